"""Records from files: JSON Lines of images and conversations, or a folder of images with a text beside each.

The format is docs/reference/dataset-format.md.

Raw bytes are stored untouched. A bad line, a missing file or a wrong field makes that one record a dead letter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyreme_datahub.digests import digest_bytes, digest_value
from polyreme_datahub.errors import BadRecordError, SourceAwayError, SourceInvalidError
from polyreme_datahub.sources.types import IMAGE_MARK, ROLES, RawRecord

JSONL = "jsonl"
FOLDER = "folder"
FOLDER_QUESTION = "Describe the image."
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
LINE_BYTES_MAX = 4 * 2**20
IMAGE_BYTES_MAX = 256 * 2**20
IMAGES_MAX = 64
TURNS_MAX = 256
ID_CHARACTERS_MAX = 512
FIELDS = frozenset({"id", "images", "conversations", "boxes", "masks"})


def describe_jsonl(path: Path) -> tuple[dict[str, Any], int]:
    """Describe a JSON Lines file by path and digest; count its lines.

    Raises:
        SourceInvalidError: If there is no such file or it is empty.
    """
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise SourceInvalidError(f"dataset file can't be read: {path}, {error.strerror}", field="source") from error
    lines += last != b"\n"
    if not lines:
        raise SourceInvalidError(f"dataset file is empty: {path}, rule at least one record", field="source")
    return {"kind": JSONL, "form": 1, "path": str(path.resolve()), "sha256": digest.hexdigest()}, lines


def describe_folder(path: Path) -> tuple[dict[str, Any], int]:
    """Describe a folder by the names, sizes and times of its images and texts; count its images.

    Raises:
        SourceInvalidError: If it holds no image.
    """
    names = _images_in(path)
    if not names:
        raise SourceInvalidError(
            f"dataset folder holds no image: {path}, endings are {', '.join(sorted(SUFFIXES))}", field="source"
        )
    listing = []
    for name in names:
        for file in (path / name, (path / name).with_suffix(".txt")):
            if file.is_file():
                stat = file.stat()
                listing.append([str(file.relative_to(path)), stat.st_size, stat.st_mtime_ns])
    return {"kind": FOLDER, "form": 1, "path": str(path.resolve()), "listing": digest_value(listing)}, len(names)


class JsonlSource:
    """Records of a JSON Lines file; paths in it are relative to its folder."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._path = Path(description["path"])
        self._sha256 = str(description["sha256"])
        self._starts: list[int] | None = None

    def record_id(self, ordinal: int) -> str:
        """Name a record by its line, where its own id can't be read."""
        return f"line-{ordinal + 1}"

    def read(self, ordinal: int) -> RawRecord:
        """Read a line and its images."""
        line = self._line(ordinal)
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"line {ordinal + 1} is no JSON: {error}", rule="json") from error
        return build_record(content, folder=self._path.parent, default_id=self.record_id(ordinal))

    def _line(self, ordinal: int) -> bytes:
        if self._starts is None:
            self._starts = self._find_starts()
        with self._path.open("rb") as file:
            file.seek(self._starts[ordinal])
            line = file.readline(LINE_BYTES_MAX + 1)
        if len(line) > LINE_BYTES_MAX:
            raise BadRecordError(f"line {ordinal + 1} is over {LINE_BYTES_MAX} bytes", rule="line-size")
        return line

    def _find_starts(self) -> list[int]:
        digest, starts, position = hashlib.sha256(), [0], 0
        try:
            with self._path.open("rb") as file:
                for line in file:
                    digest.update(line)
                    position += len(line)
                    starts.append(position)
        except OSError as error:
            raise SourceInvalidError(f"dataset file can't be read: {self._path}, {error.strerror}") from error
        if digest.hexdigest() != self._sha256:
            raise SourceInvalidError(
                f"dataset file changed since it was registered: {self._path}; register it again as a new version"
            )
        return starts


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
        return self._names[ordinal]

    def read(self, ordinal: int) -> RawRecord:
        """Read an image and its text."""
        name = self._names[ordinal]
        text = (self._path / name).with_suffix(".txt")
        try:
            caption = text.read_text("utf-8").strip()
        except FileNotFoundError as error:
            raise BadRecordError(f"no text beside the image: {text.name} is missing", rule="file") from error
        except UnicodeDecodeError as error:
            raise BadRecordError(f"text is no UTF-8: {text.name}", rule="text") from error
        content = {
            "id": name,
            "images": [name],
            "conversations": [
                {"role": "user", "content": FOLDER_QUESTION},
                {"role": "assistant", "content": caption},
            ],
        }
        return build_record(content, folder=self._path, default_id=name)


def build_record(content: Any, *, folder: Path, default_id: str) -> RawRecord:
    """Check a record's fields and read its files.

    Raises:
        BadRecordError: Naming the first rule that is broken.
    """
    if not isinstance(content, dict):
        raise BadRecordError(f"record is a {type(content).__name__}, rule an object", rule="fields")
    if unknown := sorted(set(content) - FIELDS):
        raise BadRecordError(f"unknown field: {unknown[0]!r}, fields are {', '.join(sorted(FIELDS))}", rule="fields")
    sample_id = content.get("id", default_id)
    if not isinstance(sample_id, str) or not 1 <= len(sample_id) <= ID_CHARACTERS_MAX:
        raise BadRecordError(f"id: {sample_id!r}, rule text of 1..{ID_CHARACTERS_MAX} characters", rule="id")
    try:
        return _build(content, sample_id, folder)
    except BadRecordError as error:
        raise BadRecordError(error.message, rule=error.rule, sample_id=sample_id) from error


def _build(content: Mapping[str, Any], sample_id: str, folder: Path) -> RawRecord:
    paths = _texts(content.get("images", []), "images", IMAGES_MAX)
    turns = _turns(content.get("conversations"), len(paths))
    blobs = [_read(folder, path) for path in paths]
    masks = content.get("masks", [None] * len(paths))
    if not isinstance(masks, list) or len(masks) != len(paths):
        raise BadRecordError(f"masks: rule one path or null for each of the {len(paths)} images", rule="mask")
    mask_blobs = [None if path is None else _read(folder, str(path)) for path in masks]
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
        raise BadRecordError(f"conversations: rule a list of 1..{TURNS_MAX} turns", rule="conversations")
    turns, marks = [], 0
    for turn in value:
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or turn["role"] not in ROLES:
            raise BadRecordError(
                f"turn: {str(turn)[:80]}, rule {{role, content}} with role one of {', '.join(ROLES)}",
                rule="conversations",
            )
        if not isinstance(turn["content"], str):
            raise BadRecordError("turn: content is no text", rule="conversations")
        marks += turn["content"].count(IMAGE_MARK)
        turns.append({"role": turn["role"], "content": turn["content"]})
    if not any(turn["role"] == "assistant" and turn["content"] for turn in turns):
        raise BadRecordError("conversations: no assistant turn with text, so nothing to learn", rule="conversations")
    if marks not in {0, images}:
        raise BadRecordError(
            f"conversations: {marks} {IMAGE_MARK} marks, {images} images; rule none or equal", rule="images"
        )
    return turns


def _boxes(value: Any, images: int) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRecordError("boxes: rule a list of {image, box, label}", rule="boxes")
    boxes = []
    for item in value:
        good = isinstance(item, dict) and set(item) <= {"image", "box", "label"} and _is_box(item.get("box"))
        if not good or not isinstance(item.get("image", 0), int) or not 0 <= item.get("image", 0) < images:
            raise BadRecordError(
                f"box: {str(item)[:80]}, rule {{image: 0..{images - 1}, box: [left, top, right, bottom], label}}",
                rule="boxes",
            )
        boxes.append({"image": item.get("image", 0), "box": item["box"], "label": str(item.get("label", ""))})
    return boxes


def _is_box(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(edge, int | float) for edge in value)
        and value[0] <= value[2]
        and value[1] <= value[3]
    )


def _texts(value: Any, name: str, count_max: int) -> list[str]:
    if not isinstance(value, list) or len(value) > count_max or not all(isinstance(item, str) for item in value):
        raise BadRecordError(f"{name}: rule a list of at most {count_max} paths", rule=name)
    return value


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadRecordError(f"file lies outside the dataset's folder: {name}", rule="file")
    try:
        size_bytes = path.stat().st_size
        if size_bytes > IMAGE_BYTES_MAX:
            raise BadRecordError(f"file too large: {name} has {size_bytes} bytes, rule {IMAGE_BYTES_MAX}", rule="file")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError) as error:
        raise BadRecordError(f"file can't be read: {name}, {type(error).__name__}", rule="file") from error
    except OSError as error:
        raise SourceAwayError(f"file can't be read: {path}, {error.strerror}") from error


def _images_in(path: Path) -> list[str]:
    def walk() -> Iterator[str]:
        for file in path.rglob("*"):
            if file.suffix.lower() in SUFFIXES and file.is_file():
                yield str(file.relative_to(path))

    return sorted(walk())
