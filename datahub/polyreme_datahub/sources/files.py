"""Sources of form 1, which versions before the listing have: a file or a folder that must not change.

Images of a JSON Lines file are read as they are now, and the names, sizes and times of a folder must be the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import BadRecordError, SourceAwayError, SourceInvalidError
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.records import (
    IMAGE_BYTES_MAX,
    LINE_BYTES_MAX,
    TEXT_BYTES_MAX,
    build_record,
    describe_image,
)
from polyreme_datahub.sources.types import RawRecord

JSONL = "jsonl"
FOLDER = "folder"
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
BLOCK_BYTES = 2**20
RECORDS_OWN_FAULT = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "EINVAL", "ENXIO")
)
"""What a path itself can get wrong. Any other error of the system says nothing about the record."""


def describe_folder(path: Path) -> tuple[dict[str, Any], int]:
    """Describe a folder by the names, sizes and times of its images and texts; count its images.

    Raises:
        SourceInvalidError: If it holds no image.
    """
    names = _images_in(path)
    if not names:
        raise SourceInvalidError(
            f"dataset folder holds no image: {path}, expected files ending in {', '.join(sorted(SUFFIXES))}",
            field="source",
        )
    listing = []
    for name in names:
        for file in (path / name, (path / name).with_suffix(".txt")):
            if file.is_file():
                seen = file.stat()
                listing.append([shown(str(file.relative_to(path))), seen.st_size, seen.st_mtime_ns])
    return {"kind": FOLDER, "form": 1, "path": str(path.resolve()), "listing": digest_value(listing)}, len(names)


class JsonlSource:
    """Records of a JSON Lines file; paths in it are relative to its folder."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._path = Path(description["path"])
        self._sha256 = str(description["sha256"])
        self._starts: npt.NDArray[np.int64] | None = None
        self._seen: tuple[int, int, int] | None = None

    def record_id(self, ordinal: int) -> str:
        """Name a record by its line, where its own id can't be read."""
        return f"line-{ordinal + 1}"

    def read(self, ordinal: int) -> RawRecord:
        """Read a line and its images."""
        line = self._line(ordinal)
        try:
            content = json.loads(line.decode("utf-8-sig" if ordinal == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"line {ordinal + 1} is not JSON: {error}", rule="json") from error
        if not isinstance(content, dict):
            raise BadRecordError(f"record is a {type(content).__name__}, expected an object", rule="fields")
        files = FolderFiles(self._path.parent)
        return build_record(content, files=files, default_id=self.record_id(ordinal), rules=1)

    def _line(self, ordinal: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                if self._starts is None:
                    self._starts = self._find_starts(file)
                    self._seen = _identity(file)
                if _identity(file) != self._seen:
                    raise self._changed()
                file.seek(int(self._starts[ordinal]))
                line = file.readline(LINE_BYTES_MAX + 1)
        except FileNotFoundError as error:
            raise SourceInvalidError(
                f"dataset file is missing: {self._path}; put it back or register another"
            ) from error
        except OSError as error:
            raise SourceAwayError(f"dataset file can't be read: {self._path}, {error.strerror}") from error
        if len(line) > LINE_BYTES_MAX:
            raise BadRecordError(f"line {ordinal + 1} is over {LINE_BYTES_MAX} bytes", rule="line-size")
        return line

    def _find_starts(self, file: BinaryIO) -> npt.NDArray[np.int64]:
        """Find where lines start by blocks of bytes: a line may be longer than memory."""
        digest, position = hashlib.sha256(), 0
        starts = [np.zeros(1, dtype=np.int64)]
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (position + 1))
            position += len(block)
        if digest.hexdigest() != self._sha256:
            raise self._changed()
        return np.concatenate(starts)

    def _changed(self) -> SourceInvalidError:
        return SourceInvalidError(
            f"dataset file changed since it was registered: {self._path}; register it again as a new version"
        )


class FolderSource:
    """Images of a folder, each described by the ``.txt`` beside it."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._path = Path(description["path"])
        if describe_folder(self._path)[0] != dict(description):
            raise SourceInvalidError(
                f"dataset folder changed since it was registered: {self._path}; register it again as a new version"
            )
        self._names = _images_in(self._path)

    def record_id(self, ordinal: int) -> str:
        """Name a record by its image's path."""
        return shown(self._names[ordinal])

    def read(self, ordinal: int) -> RawRecord:
        """Read an image and its text."""
        name = self._names[ordinal]
        text = str(Path(name).with_suffix(".txt"))
        content = describe_image(name, _read(self._path, text, bytes_max=TEXT_BYTES_MAX), text=text)
        return build_record(content, files=FolderFiles(self._path), default_id=self.record_id(ordinal))


class FolderFiles:
    """Files of a folder as they are now.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def size(self, name: str) -> int:
        """Return the size of a file; 0 if it can't be read."""
        with contextlib.suppress(OSError, ValueError):
            return (self._folder / name).stat().st_size
        return 0

    def read(self, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:
        """Read a regular file inside the folder, links followed."""
        return _read(self._folder, name, bytes_max=bytes_max)


def _read(folder: Path, name: str, *, bytes_max: int) -> bytes:
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise BadRecordError(f"file is outside the dataset's folder: {name!r}", rule="file")
        # A pipe must not make us wait for its writer: open it without, then see what it is.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            seen = os.fstat(descriptor)
            if not stat.S_ISREG(seen.st_mode):
                raise BadRecordError(f"file can't be read: {name!r} is not a regular file", rule="file")
            if seen.st_size > bytes_max:
                raise BadRecordError(
                    f"file is too large: {name!r} has {seen.st_size} bytes, expected at most {bytes_max}", rule="file"
                )
            return file.read(bytes_max)
    except (ValueError, RuntimeError) as error:  # a NUL in the name; a loop of links
        raise BadRecordError(f"file can't be read: {name!r}, {error}", rule="file") from error
    except OSError as error:
        if error.errno in RECORDS_OWN_FAULT and folder.is_dir():
            raise BadRecordError(f"file can't be read: {name!r}, {error.strerror}", rule="file") from error
        raise SourceAwayError(f"file can't be read: {folder / name}, {error.strerror}") from error


def _identity(file: BinaryIO) -> tuple[int, int, int]:
    seen = os.fstat(file.fileno())
    return seen.st_ino, seen.st_size, seen.st_mtime_ns


def _images_in(path: Path) -> list[str]:
    def walk() -> Iterator[str]:
        for file in path.rglob("*"):
            if file.suffix.lower() in SUFFIXES and file.is_file():
                yield str(file.relative_to(path))

    return sorted(walk())
