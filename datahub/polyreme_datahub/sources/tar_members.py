"""Lists a tar shard: its samples in order, each with the place, size and digest of its members.

Members of one sample share their key: the path up to the first dot of the name, as WebDataset has it. Mostly they lie
together; a key that returns later in the shard joins its halves. The tar is read once, block by block; what is wrong
with it or with a member is kept as the sentence of a dead letter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import BinaryIO, cast

from polyreme_datahub.sources.external_sort import Row, sorted_rows
from polyreme_datahub.sources.files import SUFFIXES
from polyreme_datahub.sources.listing import Entry
from polyreme_datahub.sources.names import refusal, shown
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX, LINE_BYTES_MAX, TEXT_BYTES_MAX

TEXT, RECORD = ".txt", ".json"
BYTES_MAX = {TEXT: TEXT_BYTES_MAX, RECORD: LINE_BYTES_MAX}
"""Of a member; an image has ``IMAGE_BYTES_MAX``."""
DAMAGED = "tar"
"""Rule of a shard that can't be read further."""
MEMBERS_MAX = 128
"""Of one sample."""
HEADER_BYTES_MAX = 2**20
"""Of one extended header, which is read as a whole; names need a few hundred bytes."""
BLOCK_BYTES = 2**20
_FIELDS = tuple(field.name for field in dataclasses.fields(Entry))
_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]+", re.DOTALL)


def key_of(name: str) -> str:
    """Return the key of the sample that a member belongs to; empty if its name has none."""
    found = _KEY.fullmatch(name)
    return found[1] if found else ""


def is_text(name: str) -> bool:
    """Tell whether a member holds a sample's text."""
    return _suffix(name) == TEXT


def is_record(name: str) -> bool:
    """Tell whether a member holds a sample's record."""
    return _suffix(name) == RECORD


def samples_of(
    file: BinaryIO, path: str, etag: str, *, images: frozenset[str] = SUFFIXES, left: list[str]
) -> Iterator[list[Entry]]:
    """Yield the entries of each sample: its images, text and record, or one with a problem.

    Args:
        file: The shard, seekable.
        path: Its path in the dataset.
        etag: Of the object in a bucket.
        images: Suffixes of images.
        left: Gets the names of members that are not read.
    """
    joined = _Joined()
    groups = joined.groups(_Shard(file, path, etag, images, left).members())
    for group in sorted_rows(groups, key=lambda rows: rows[0][1]):  # all members have been seen before the first comes
        found = [Entry(**dict(zip(_FIELDS, values, strict=True))) for *_, values in group]
        if joined.damage and _parts(group) < joined.parts_max:
            yield [dataclasses.replace(joined.damage, member=found[0].member)]
        else:
            yield _sample(found, group[0][0], images, left)


class _Joined:
    """Members by sample: sorted by key, since any key may return at the end of a shard."""

    def __init__(self) -> None:
        self.parts_max = 0
        """Most parts in which a sample lies."""
        self.damage: Entry | None = None
        """Then a sample of fewer parts may lack one."""

    def groups(self, members: Iterator[Entry]) -> Iterator[Row]:
        """Yield the members of each sample as ``[key, number, part, values]``."""
        for _, group in itertools.groupby(
            sorted_rows(self._rows(members), key=lambda row: row[:2]), key=lambda row: row[0]
        ):
            some = list(itertools.islice(group, MEMBERS_MAX + 1))  # groupby passes over the rest of too many
            self.parts_max = max(self.parts_max, _parts(some))
            yield some

    def _rows(self, members: Iterator[Entry]) -> Iterator[Row]:
        part, last = 0, ""
        for number, entry in enumerate(members):
            if entry.rule == DAMAGED:
                self.damage = entry
            key = key_of(entry.member)
            part, last = part + (key != last), key
            yield [key, number, part, [getattr(entry, name) for name in _FIELDS]]


def _parts(group: Row) -> int:
    return len({part for _, _, part, _ in group})


def _sample(found: Sequence[Entry], key: str, images: frozenset[str], left: list[str]) -> list[Entry]:
    if bad := [entry for entry in found if entry.problem]:
        return [next((entry for entry in bad if entry.rule == DAMAGED), bad[0])]
    of_sample = f"{found[0].path}: sample {key!r}"
    used = [entry for entry in found if _suffix(entry.member) in images or _suffix(entry.member) in BYTES_MAX]
    names = [entry.member for entry in used]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if len(found) > MEMBERS_MAX:
        reason = f"it has more than {MEMBERS_MAX} members"
    elif not used:
        seen = ", ".join(sorted({_suffix(entry.member) or shown(entry.member) for entry in found}))
        reason = f"its members end in {seen}, expected an image, {TEXT} or {RECORD}"
    elif twice:
        reason = f"it has the member {twice[0]!r} twice"
    elif sum(map(is_text, names)) > 1 or sum(map(is_record, names)) > 1:
        reason = f"it has two texts or two records: {', '.join(map(shown, names))}"
    else:
        left += [entry.member for entry in found if entry not in used]
        return used
    return [
        Entry(record=0, path=found[0].path, member=found[0].member, problem=f"{of_sample}: {reason}", rule="member")
    ]


class _DamagedError(Exception):
    """The rest of a shard can't be read."""


class _Shard:
    def __init__(self, file: BinaryIO, path: str, etag: str, images: frozenset[str], left: list[str]) -> None:
        self._file, self._path, self._etag, self._images = file, path, etag, images
        self._left = left

    def members(self) -> Iterator[Entry]:
        """Yield the members that belong to a sample.

        Damage is a problem of the last one, whose sample may lack members.
        """
        after, last = 0, ""
        try:
            with tarfile.open(fileobj=cast("BinaryIO", _HeaderFile(self._file)), mode="r:") as tar:
                while (info := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined] # it keeps all of them
                    if info.size < 0 or tar.offset <= after:
                        raise _DamagedError(f"the header before byte {tar.offset} has a size of {info.size}")
                    after = tar.offset
                    if (entry := self._entry(info)) is not None:
                        last = entry.member
                        yield entry
                self._check_end(tar.offset)
        except (tarfile.TarError, _DamagedError, ValueError, OverflowError, RecursionError) as error:
            reason = f"{shown(self._path)}: the shard is damaged or cut off after byte {after}: {error}"
            yield Entry(record=0, path=self._path, member=last, problem=reason, rule=DAMAGED)

    def _check_end(self, offset: int) -> None:
        """Check that what stopped tarfile is the end mark: it also stops, without a word, at damage."""
        self._file.seek(offset)
        mark = self._file.read(tarfile.BLOCKSIZE)
        if mark != bytes(tarfile.BLOCKSIZE):
            cut = len(mark) < tarfile.BLOCKSIZE
            raise _DamagedError("there is no end mark" if cut else "what follows is not a header")

    def _entry(self, info: tarfile.TarInfo) -> Entry | None:
        """Return a member's entry; None if it belongs to no sample."""
        name = info.name.removeprefix("./")
        if info.isdir():
            return None
        if not key_of(name):
            self._left.append(name)
            return None
        entry = Entry(record=0, path=self._path, member=name, etag=self._etag)
        suffix = _suffix(name)
        bytes_max = IMAGE_BYTES_MAX if suffix in self._images else BYTES_MAX.get(suffix, 0)
        if reason := refusal(name):
            return _bad(entry, reason, "path")
        if not info.isreg() or info.issparse():
            return _bad(entry, f"it is {_kind(info)}, expected a regular file", "member")
        if not bytes_max:
            return entry
        if info.size > bytes_max:
            return _bad(entry, f"it has {info.size} bytes, expected at most {bytes_max}", "file")
        digest = self._digest(info, name)
        return dataclasses.replace(entry, start=info.offset_data, size=info.size, sha256=digest)

    def _digest(self, info: tarfile.TarInfo, name: str) -> str:
        digest, left = hashlib.sha256(), info.size
        self._file.seek(info.offset_data)
        while left:
            block = self._file.read(min(left, BLOCK_BYTES))
            if not block:
                raise _DamagedError(f"member {name!r} lacks {left} of {info.size} bytes")
            digest.update(block)
            left -= len(block)
        return digest.hexdigest()


class _HeaderFile:
    """What tarfile reads headers from: it would take an extended header of any size into memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """Read part of a header."""
        if not 0 <= size <= HEADER_BYTES_MAX:
            raise _DamagedError(f"a header has {size} bytes, expected at most {HEADER_BYTES_MAX}")
        return self._file.read(size)


def _bad(entry: Entry, reason: str, rule: str) -> Entry:
    problem = f"{shown(entry.path)}: member {entry.member!r} can't be read, {reason}"
    return dataclasses.replace(entry, problem=problem, rule=rule)


def _kind(info: tarfile.TarInfo) -> str:
    if info.issym() or info.islnk():
        return "a link"
    return "a pipe" if info.isfifo() else "a device" if info.isdev() else "a sparse file" if info.issparse() else "odd"


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
