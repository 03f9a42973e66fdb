"""Records from files: JSON Lines of images and conversations, or a folder of images with a text beside each.

The format is docs/reference/dataset-format.md.

Raw bytes are stored untouched. A bad line, a missing file or a wrong field makes that one record a dead letter.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import digest_bytes, digest_value
from polyreme_datahub.errors import BadRecordError, SourceAwayError, SourceInvalidError
from polyreme_datahub.sources.types import IMAGE_MARK, ROLES, RawRecord

JSONL = "jsonl"
FOLDER = "folder"
FOLDER_QUESTION = "Describe the image."
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
SUFFIXES_UNREAD = frozenset({".heic", ".heif", ".avif", ".jxl", ".jp2"})
"""Images that no decoder here reads: they are listed, so that each is a dead letter and not silently left out."""
LINE_BYTES_MAX = 4 * 2**20
IMAGE_BYTES_MAX = 256 * 2**20
RECORD_BYTES_MAX = 512 * 2**20
TEXT_BYTES_MAX = 4 * 2**20
BOX_PX_MAX = 1e6
IMAGES_MAX = 64
TURNS_MAX = 256
ID_CHARACTERS_MAX = 512
FIELDS = frozenset({"id", "images", "conversations", "boxes", "masks"})
BLOCK_BYTES = 2**20
RECORDS_OWN_FAULT = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "ENAMETOOLONG", "ELOOP", "EINVAL", "ENXIO")
)
"""What a path itself can get wrong. Any other error of the system says nothing about the record."""


def describe_jsonl(path: Path) -> tuple[dict[str, Any], int]:
    """Describe a JSON Lines file by path and digest; count its lines.

    Raises:
        SourceInvalidError: If there is no such file or it is empty.
    """
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise SourceInvalidError(f"dataset file can't be read: {path}, {error.strerror}", field="source") from error
    lines += last != b"\n"
    if not lines:
        raise SourceInvalidError(f"dataset file is empty: {path}, expected at least one record", field="source")
    return {"kind": JSONL, "form": 1, "path": str(path.resolve()), "sha256": digest.hexdigest()}, lines


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
                listing.append([_shown(str(file.relative_to(path))), seen.st_size, seen.st_mtime_ns])
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
        return build_record(content, folder=self._path.parent, default_id=self.record_id(ordinal))

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
        return _shown(self._names[ordinal])

    def read(self, ordinal: int) -> RawRecord:
        """Read an image and its text."""
        name = self._names[ordinal]
        text = str(Path(name).with_suffix(".txt"))
        try:
            caption = _read(self._path, text, bytes_max=TEXT_BYTES_MAX).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"text is not UTF-8: {text}", rule="text") from error
        content = {
            "id": _shown(name),
            "images": [name],
            "conversations": [
                {"role": "user", "content": FOLDER_QUESTION},
                {"role": "assistant", "content": caption},
            ],
        }
        return build_record(content, folder=self._path, default_id=self.record_id(ordinal))


def build_record(content: Any, *, folder: Path, default_id: str) -> RawRecord:
    """Check a record's fields and read its files.

    Raises:
        BadRecordError: Naming the first rule that is broken.
    """
    if not isinstance(content, dict):
        raise BadRecordError(f"record is a {type(content).__name__}, expected an object", rule="fields")
    if unknown := sorted(set(content) - FIELDS):
        raise BadRecordError(f"unknown field: {unknown[0]!r}, fields are {', '.join(sorted(FIELDS))}", rule="fields")
    sample_id = content.get("id", default_id)
    if not isinstance(sample_id, str) or not 1 <= len(sample_id) <= ID_CHARACTERS_MAX or not sample_id.isprintable():
        raise BadRecordError(
            f"id is {reprlib.repr(sample_id)}, expected text of 1 to {ID_CHARACTERS_MAX} printable characters",
            rule="id",
        )
    try:
        return _build(content, sample_id, folder)
    except BadRecordError as error:
        raise BadRecordError(error.message, rule=error.rule, sample_id=sample_id) from error


def _build(content: Mapping[str, Any], sample_id: str, folder: Path) -> RawRecord:
    paths = _texts(content.get("images", []), "images", IMAGES_MAX)
    turns = _turns(content.get("conversations"), len(paths))
    blobs = [_read(folder, path) for path in _within(folder, paths)]
    masks = content.get("masks", [None] * len(paths))
    if not isinstance(masks, list) or len(masks) != len(paths):
        raise BadRecordError(
            f"masks do not match the images, expected a path or null for each of the {len(paths)} images", rule="mask"
        )
    _texts([path for path in masks if path is not None], "mask", IMAGES_MAX)
    mask_blobs = [None if path is None else _read(folder, path) for path in masks]
    record = {
        "id": sample_id,
        "kind": "images",
        "images": [digest_bytes(blob) for blob in blobs],
        "masks": [None if blob is None else digest_bytes(blob) for blob in mask_blobs],
        "boxes": _boxes(content.get("boxes", []), len(paths)),
        "conversations": turns,
    }
    return RawRecord(sample_id=sample_id, content=record, blobs=[*blobs, *(b for b in mask_blobs if b is not None)])


def _turns(value: Any, images: int) -> list[dict[str, str]]:
    if not isinstance(value, list) or not 1 <= len(value) <= TURNS_MAX:
        raise BadRecordError(
            f"conversations is not valid, expected a list of 1 to {TURNS_MAX} turns", rule="conversations"
        )
    turns, marks = [], 0
    for turn in value:
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or turn["role"] not in ROLES:
            raise BadRecordError(
                f"turn is {reprlib.repr(turn)}, expected {{role, content}} with role one of {', '.join(ROLES)}",
                rule="conversations",
            )
        if not isinstance(turn["content"], str) or not _is_unicode(turn["content"]):
            raise BadRecordError("turn: content is not text, or has lone surrogates", rule="conversations")
        marks += turn["content"].count(IMAGE_MARK)
        turns.append({"role": turn["role"], "content": turn["content"]})
    if not any(turn["role"] == "assistant" and turn["content"] for turn in turns):
        raise BadRecordError(
            "conversations has no assistant turn with text, so there is nothing to learn", rule="conversations"
        )
    if marks not in {0, images}:
        raise BadRecordError(
            f"conversations: {marks} {IMAGE_MARK} marks, {images} images; expected no marks, or one for each image",
            rule="images",
        )
    return turns


def _boxes(value: Any, images: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRecordError("boxes is not valid, expected a list of {image, box, label}", rule="boxes")
    boxes = []
    for item in value:
        good = isinstance(item, dict) and set(item) <= {"image", "box", "label"} and _is_box(item.get("box"))
        good = good and isinstance(item.get("label", ""), str) and _is_unicode(item.get("label", ""))
        if not good or type(item.get("image", 0)) is not int or not 0 <= item.get("image", 0) < images:
            raise BadRecordError(
                f"box is {reprlib.repr(item)}, expected "
                f"{{image: 0..{images - 1}, box: [left, top, right, bottom], label}}",
                rule="boxes",
            )
        boxes.append({"image": item.get("image", 0), "box": item["box"], "label": item.get("label", "")})
    return boxes


def _is_box(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(type(edge) in {int, float} and abs(edge) <= BOX_PX_MAX for edge in value)
        and value[0] <= value[2]
        and value[1] <= value[3]
    )


def _texts(value: Any, name: str, count_max: int) -> list[str]:
    if not isinstance(value, list) or len(value) > count_max or not all(isinstance(item, str) for item in value):
        raise BadRecordError(f"{name} is not valid, expected a list of at most {count_max} paths", rule=name)
    return value


def _within(folder: Path, paths: Sequence[str]) -> Iterator[str]:
    """Yield the paths while their files together stay inside a record's bound."""
    total_bytes = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            total_bytes += (folder / path).stat().st_size
        if total_bytes > RECORD_BYTES_MAX:
            raise BadRecordError(f"images are too large: more than {RECORD_BYTES_MAX} bytes in one record", rule="file")
        yield path


def _read(folder: Path, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:
    """Read a regular file inside the folder, links followed."""
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


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(name: str) -> str:
    """Write a file's name, which may be any bytes, as text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _images_in(path: Path) -> list[str]:
    def walk() -> Iterator[str]:
        for file in path.rglob("*"):
            if file.suffix.lower() in SUFFIXES | SUFFIXES_UNREAD and file.is_file():
                yield str(file.relative_to(path))

    return sorted(walk())
