"""The tree of files of a dataset: a folder of this machine. ``bucket.py`` has the same for a bucket."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError, SourceAwayError, SourceInvalidError
from polyreme_datahub.sources.external_sort import Row
from polyreme_datahub.sources.listing import Entry
from polyreme_datahub.sources.names import refusal

BLOCK_BYTES = 2**20
FILES_OWN_FAULT = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "EINVAL", "ENXIO")
)
"""What a path itself can get wrong. Any other error of the system says nothing about the file."""
AGAIN = "register the dataset again as a new version, or put back what was registered"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a file is now."""

    size: int = 0
    sha256: str = ""
    etag: str = ""
    problem: str = ""
    rule: str = ""


class Tree(Protocol):
    """The files of a dataset, by their path below its root."""

    def walk(self) -> Iterator[Row]:
        """Yield ``[path, size, etag]`` of every file, in any order; size -1 where it is not known.

        Raises:
            SourceInvalidError: If a folder can't be listed: files would be left out.
        """
        ...

    def look(self, name: str, *, bytes_max: int, seen: Row | None = None) -> Look:
        """Digest a file, or find out why it can't be read.

        Args:
            name: Its path.
            bytes_max: A larger file is a problem.
            seen: What ``walk`` has yielded for it.

        Raises:
            SourceAwayError: If it can't be read now, and that is not the file's own fault.
        """
        ...

    def read(self, entry: Entry) -> bytes:
        """Read a listed file, or a listed part of it, and check that it is still what was listed.

        Raises:
            SourceInvalidError: If it changed since.
            SourceAwayError: If it can't be read now.
        """
        ...

    def open(self, name: str) -> tuple[BinaryIO, str]:
        """Open a file to be read from its start; return its ETag, too."""
        ...

    def open_found(self, name: str) -> tuple[BinaryIO, str]:
        """Open a file that ``walk`` has yielded, as ``open`` does.

        Raises:
            BadRecordError: If it is one that is never read, such as a pipe or a link that leads outside.
            SourceAwayError: If it can't be read now.
        """
        ...


class _ProblemError(Exception):
    """A file that can't be read, and never could."""

    def __init__(self, reason: str, rule: str = "file") -> None:
        super().__init__(reason)
        self.reason, self.rule = reason, rule


class LocalTree:
    """A folder.

    Args:
        root: The folder; no file outside is ever read, links followed.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))

    def walk(self) -> Iterator[Row]:
        """Yield every file; folders that are links are not entered."""
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(self._root / folder) as found:
                    for file in found:
                        path = f"{folder}{file.name}"
                        if file.is_dir(follow_symlinks=False):
                            folders.append(path + "/")
                        elif not (file.is_symlink() and file.is_dir()):
                            yield [path, -1, ""]
            except OSError as error:
                raise SourceInvalidError(
                    f"folder can't be listed: {self._root / folder}, {error.strerror}; its files would be left out: "
                    "make it readable",
                    field="source",
                ) from error

    def look(self, name: str, *, bytes_max: int, seen: Row | None = None) -> Look:  # noqa: ARG002 - as the others
        """Digest a file."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._open(name) as (file, _):
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
                    size += len(block)
                    if size > bytes_max:
                        raise _ProblemError(f"it has more than {bytes_max} bytes")
        except _ProblemError as error:
            return Look(problem=problem_of(name, error.reason), rule=error.rule)
        return Look(size=size, sha256=digest.hexdigest())

    def read(self, entry: Entry) -> bytes:
        """Read and check a file, or a part of one."""
        try:
            with self._open(entry.path) as (file, size):
                file.seek(max(0, entry.start))
                data = file.read(entry.size)
        except _ProblemError as error:
            raise changed(str(self._root / entry.path), error.reason) from error
        if entry.is_part:
            return check_bytes(data, entry, where=str(self._root / entry.path))
        if size != entry.size:
            raise changed(str(self._root / entry.path), f"it has {size} bytes, {entry.size} were registered")
        return check_bytes(data, entry, where=str(self._root / entry.path))

    def open(self, name: str) -> tuple[BinaryIO, str]:
        """Open a file."""
        try:
            return (self._root / name).open("rb"), ""
        except OSError as error:
            raise SourceInvalidError(
                f"dataset file can't be read: {self._root / name}, {error.strerror}", field="source"
            ) from error

    def open_found(self, name: str) -> tuple[BinaryIO, str]:
        """Open a regular file inside the root."""
        with ExitStack() as stack:
            try:
                file, _ = stack.enter_context(self._open(name))
            except _ProblemError as error:
                raise BadRecordError(problem_of(name, error.reason), rule=error.rule) from error
            return os.fdopen(os.dup(file.fileno()), "rb"), ""

    @contextmanager
    def _open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """Open a regular file inside the root, and return its size."""
        if reason := refusal(name):
            raise _ProblemError(reason, rule="path")
        try:
            path = Path(os.path.realpath(self._root / name, strict=True))
            if not path.is_relative_to(self._root):
                raise _ProblemError("a link leads outside the dataset's folder", rule="path")
            # A pipe must not make us wait for its writer: open it without, then see what it is.
            with _closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
                seen = os.fstat(descriptor)
                if not stat.S_ISREG(seen.st_mode):
                    raise _ProblemError(f"it is {_kind(seen.st_mode)}, expected a regular file")
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    yield file, seen.st_size
        except OSError as error:
            if error.errno in FILES_OWN_FAULT and self._root.is_dir():
                raise _ProblemError(str(error.strerror)) from error
            raise SourceAwayError(f"file can't be read: {self._root / name}, {error.strerror}") from error


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def changed(where: str, how: str) -> SourceInvalidError:
    """Make the error for a file that is no longer what was registered."""
    return SourceInvalidError(f"file changed since it was registered: {where}, {how}; {AGAIN}")


def check_bytes(data: bytes, entry: Entry, *, where: str) -> bytes:
    """Return the bytes of a listed file or line.

    Raises:
        SourceInvalidError: If they are not those that were listed.
    """
    if len(data) != entry.size or (entry.sha256 and digest_bytes(data) != entry.sha256):
        part = f" at byte {entry.start}" if entry.is_part else ""
        raise changed(where, f"its bytes{part} are others")
    return data


def problem_of(name: str, reason: str) -> str:
    """Return the sentence of a dead letter."""
    return f"file can't be read: {name!r}, {reason}"


def _kind(mode: int) -> str:
    kinds: tuple[tuple[Callable[[int], bool], str], ...] = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for matches, name in kinds if matches(mode)), "a device")
