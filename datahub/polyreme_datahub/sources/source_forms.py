"""Finds out which form the files of a folder or prefix have: shards, tables, or images with texts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.sources.describe import TEXT, UNREAD, stem
from polyreme_datahub.sources.external_sort import Row, sorted_rows
from polyreme_datahub.sources.files import FOLDER, SUFFIXES
from polyreme_datahub.sources.found import Found, is_of_mac
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.records import PDF
from polyreme_datahub.sources.text_files import KINDS as TEXT_FILES
from polyreme_datahub.sources.trees import Tree

SHARDS = "webdataset"
PARQUET = "parquet"
ARROW = "arrow"
KINDS: Mapping[str, str] = {
    ".tar": SHARDS,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    **dict.fromkeys((*SUFFIXES, *UNREAD, PDF), FOLDER),
}
"""Form of a folder that holds files of a suffix. Texts belong to images, and say nothing beside other forms."""
PART_SUFFIXES = tuple(suffix for suffix, kind in KINDS.items() if kind != FOLDER)
"""Of files that hold many records each."""
COMPRESSED = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)$", re.IGNORECASE)
CACHED = re.compile(r"(.*/)?cache-[^/]*\.arrow")
"""What ``datasets`` leaves beside a dataset's own files."""
METADATA = frozenset({"metadata.jsonl", "metadata.csv", "metadata.parquet"})
"""Files of an ``ImageFolder`` of ``datasets``, which name its images."""
METADATA_MAX = 8
ENERGON_SPLITS = ".nv-meta/split.yaml"
ENERGON_SPLIT = re.compile(r"^ +([^\s:#-][^:\n]*): *\n *- ", re.MULTILINE)
"""A split of that file which has shards."""
ENERGON_EXCLUDED = re.compile(r"^exclude: *\n *- ", re.MULTILINE)
STATE = "state.json"
STATE_BYTES_MAX = 16 * 2**20
SPLIT = re.compile(r"(.+?)-\d+-of-\d+")
PLAIN_STEMS = frozenset({"data", "part", "shard"})
"""What numbered files are called that belong to no split of their own."""
SPLIT_FOLDERS = frozenset({"train", "training", "test", "validation", "valid", "val", "dev"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of a folder."""

    kind: str
    rows: Iterator[Row]
    """Of its files, sorted: with texts if they are images."""
    images: int = 0
    texts: int = 0
    metadata: tuple[str, ...] = ()
    """Files that may name the images (``ImageFolder`` of ``datasets``)."""


def form_of(rows: Iterable[Row], where: str, *, pattern: str = "*", is_file: bool = False, found: Found) -> Form:
    """Find out which form the files of a folder have.

    Args:
        rows: Of all its files (``Tree.walk``).
        where: What the user named, for messages.
        pattern: What files at the root are named like; of other folders none then, unless it is ``*``.
        is_file: Whether the pattern is the name of one file.
        found: Counts the files that are not read.

    Raises:
        SourceInvalidError: If they have several forms, or several splits.
    """
    seen = _Seen(where, found)
    every = pattern == "*" or is_file
    ordered = sorted_rows(
        seen.kept(row for row in rows if every or _matches(row[0], pattern)), key=lambda row: stem(row[0])
    )
    first = list(itertools.islice(ordered, 1))  # all rows have been seen before the first comes out
    kind = seen.kind()
    if kind != FOLDER and seen.texts:
        found.left[TEXT] += seen.texts
    unwanted = ".parquet" if kind == FOLDER else TEXT
    return Form(
        kind=kind,
        rows=(row for row in itertools.chain(first, ordered) if _suffix(row[0]) != unwanted),
        images=seen.images,
        texts=seen.texts,
        metadata=tuple(sorted(seen.metadata)[:METADATA_MAX]) if kind == FOLDER else (),
    )


def names_images(tree: Tree, name: str) -> bool:
    """Tell whether a metadata file names images, and not something else."""
    data = _beginning(tree, name)
    return data is not None and (name.endswith(".parquet") or b"file_name" in data)


def check_splits(tree: Tree, where: str) -> None:
    """Refuse a folder of shards that Energon has split: those of one split would be trained with those of another.

    Raises:
        SourceInvalidError: Naming the splits.
    """
    text = (_beginning(tree, ENERGON_SPLITS) or b"").decode("utf-8", "replace")
    splits = ENERGON_SPLIT.findall(text.partition("split_parts:")[2])
    if len(splits) > 1:
        raise SourceInvalidError(
            f"dataset folder {where} holds Energon's splits {', '.join(splits)} ({ENERGON_SPLITS}); name the "
            f"shards of one by a pattern, as in '{where}/shard_00[0-8]*.tar'",
            field="source",
        )
    if ENERGON_EXCLUDED.search(text):
        raise SourceInvalidError(
            f"dataset folder {where} excludes shards or samples ({ENERGON_SPLITS}), which would be learned; name the "
            f"shards to take by a pattern, as in '{where}/*.tar'",
            field="source",
        )


def saved_files(tree: Tree, found: Iterable[str], where: str) -> list[str]:
    """Return the files of a dataset that ``save_to_disk`` wrote, in its order; those found if it has no state.

    Raises:
        SourceInvalidError: If the state names other files, or rows of them.
    """
    names = list(found)
    if (data := _beginning(tree, STATE)) is None:
        return names
    try:
        state = json.loads(data)
        named = [data_file["filename"] for data_file in state["_data_files"]]
        rows = state.get("_indices_data_files")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceInvalidError(f"dataset file {where}/{STATE} is damaged: {error!r}", field="source") from error
    missing = [name for name in named if name not in names]
    if missing or rows:
        what = f"names {missing[0]!r}, which is not there" if missing else "chooses rows; flatten_indices() first"
        raise SourceInvalidError(f"dataset file {where}/{STATE} {what}", field="source")
    return named


def _beginning(tree: Tree, name: str) -> bytes | None:
    """Return the beginning of a file; None if there is none that can be read."""
    try:
        file, _ = tree.open_found(name)
    except (BadRecordError, SourceInvalidError):
        return None
    with file:
        return file.read(STATE_BYTES_MAX)


def is_pattern(name: str) -> bool:
    """Tell whether the last part of a path names files by a pattern."""
    return "*" in name.rpartition("/")[2] or "?" in name.rpartition("/")[2]


def _matches(name: str, pattern: str) -> bool:
    return "/" not in name and fnmatchcase(name, pattern)


class _Seen:
    """What a folder holds: the first file of each form, and of each split."""

    def __init__(self, where: str, found: Found) -> None:
        self._where, self._found = where, found
        self._firsts: dict[str, str] = {}
        self._splits: dict[str, str] = {}
        self._compressed = ""
        self._lines = ""
        self.images = self.texts = 0
        self.metadata: list[str] = []

    def kept(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            name = row[0]
            suffix = _suffix(name)
            if COMPRESSED.search(name):
                self._compressed = self._compressed or name
            if is_of_mac(name) or CACHED.fullmatch(name):
                self._found.leave([name])
                continue
            self.images += suffix in SUFFIXES
            self.texts += suffix == TEXT
            if suffix in TEXT_FILES and not name.startswith("."):
                self._lines = min(self._lines or name, name)
            if name.rpartition("/")[2] in METADATA and len(self.metadata) < METADATA_MAX:
                self.metadata.append(name)
                if suffix == ".parquet":
                    yield row
                continue
            if kind := KINDS.get(suffix):
                self._firsts.setdefault(kind, name)
                if kind != FOLDER:
                    self._splits.setdefault(split_of(name), name)
            if kind or suffix == TEXT:
                yield row
            elif not f"/{name}".rpartition("/.")[1]:
                self._found.leave([name])

    def kind(self) -> str:
        """Return the form.

        Raises:
            SourceInvalidError: If there are several.
        """
        if not self.images and (tables := [name for name in self.metadata if name.endswith(".parquet")]):
            self._firsts.setdefault(PARQUET, tables[0])
        kinds = sorted(self._firsts)
        if not kinds and self._lines:
            raise self._refused(
                "holds no image, shard or table; name the file with its records, as in "
                f"'{self._where}/{shown(self._lines)}'"
            )
        if len(kinds) > 1:
            names = " and ".join(shown(self._firsts[kind]) for kind in kinds)
            raise self._refused(f"holds files of {len(kinds)} forms, such as {names}; name a folder with those of one")
        if self._compressed and kinds != [FOLDER]:
            raise self._refused(
                f"holds a compressed shard: {shown(self._compressed)}, whose members can't be read one by one; "
                "uncompress it (images hardly shrink)"
            )
        if len(self._splits) > 1:
            raise self._refused(
                f"holds the splits {', '.join(sorted(self._splits))}; name the files of one, as in "
                f"'{self._where}/{self._example()}'"
            )
        return kinds[0] if kinds else FOLDER

    def _example(self) -> str:
        split, name = min(self._splits.items(), key=lambda item: (item[0] != "train", item[0]))
        folder, _, last = name.rpartition("/")
        own = f"{split}-*{_suffix(last)}" if last.startswith(f"{split}-") else ""
        return "/".join(filter(None, (shown(folder), own)))

    def _refused(self, reason: str) -> SourceInvalidError:
        return SourceInvalidError(f"dataset folder {self._where} {reason}", field="source")


def split_of(name: str) -> str:
    """Return the split that a file says to belong to, as Hugging Face names them; empty if it says none."""
    path = PurePosixPath(name)
    if (found := SPLIT.match(path.name)) and found[1] not in PLAIN_STEMS:
        return found[1]
    return next((part for part in reversed(path.parts[:-1]) if part.lower() in SPLIT_FOLDERS), "")


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
