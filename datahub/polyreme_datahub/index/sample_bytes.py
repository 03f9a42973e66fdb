"""The encoded form of a sample: a record (JSON) and its images as they came, neighbouring members of a tar file.

So one range of bytes is one sample. The record holds the turns of the conversation, and for each page either a scan's
description (``digits``) or the file of its image and the rules by which it is opened; and what the sample has of boxes,
points, polygons and ``mirrorSafe``. Light to import: ranks read it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyreme_datahub.digests import canonical_json

if TYPE_CHECKING:
    import numpy.typing as npt

RECORD_FILE = "json"
MIRROR_SAFE = "mirrorSafe"
"""Field of a record: whether its images may be mirrored while its text stays."""
REJECTED = "rejected"
"""Field of a preference's record: the text of the answer that is worse than the last turn."""
GRIDS = "grids"
"""Field of a sample that is trained on in pieces: the grids of all its images. Its index has those of each piece."""
BLOCK = 512
_NAME, _SIZE, _KIND = slice(0, 100), slice(124, 136), slice(156, 157)
_REGULAR = (b"0", b"\0")
_MAGIC: Sequence[tuple[bytes, str]] = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)


def sample_bytes(
    record: Mapping[str, Any],
    pages: Sequence[Mapping[str, Any]],
    images: Mapping[str, bytes],
    shapes: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    grids: Sequence[Sequence[int]] | None = None,
) -> dict[str, bytes]:
    """Return the files of a sample by extension.

    Args:
        record: As its source gave it.
        pages: Pages of ``compose``.
        images: Bytes of the pages' images, by digest.
        shapes: Boxes, points and polygons, in pixels of their pages.
        grids: Rows and columns of patches of each page, of a sample that is trained on in pieces; None: it is whole.
    """
    files: dict[str, bytes] = {}
    described: list[dict[str, Any]] = []
    for at, page in enumerate(pages):
        if "image" not in page:
            described.append({name: record[name] for name in ("height", "width", "digits")})
            continue
        data = images[page["image"]]
        name = f"{at}.{extension_of(data)}"
        files[name] = data
        described.append({"file": name, "open": page["open"]})
    given = {name: record[name] for name in (MIRROR_SAFE, REJECTED) if name in record}
    given |= {field: items for field, items in shapes.items() if items}
    given |= {} if grids is None else {GRIDS: grids}
    files[RECORD_FILE] = canonical_json({"conversations": record["conversations"], "pages": described, **given})
    return files


def texts_of(record: Mapping[str, Any]) -> list[str]:
    """Return the texts of a record: its turns, and the rejected answer of a preference."""
    return [*(turn["content"] for turn in record["conversations"]), *([record[REJECTED]] if REJECTED in record else [])]


def member_files(data: bytes | memoryview) -> dict[str, memoryview]:
    """Cut a sample's files out of its range, by extension.

    Raises:
        ValueError: If the range is no run of regular members; its digest then belongs to other bytes than a sample's.
    """
    view, at = memoryview(data), 0
    files: dict[str, memoryview] = {}
    while at + BLOCK <= len(view):
        header = bytes(view[at : at + BLOCK])
        if header[_KIND] not in _REGULAR:
            raise ValueError(f"member of kind {header[_KIND]!r}, expected a regular file")
        size = int(header[_SIZE].rstrip(b"\0 "), 8)
        name = header[_NAME].rstrip(b"\0").decode()
        at += BLOCK
        files[name.partition(".")[2]] = view[at : at + size]
        at += -(-size // BLOCK) * BLOCK
    return files


def check_of(tokens_T: npt.NDArray[Any], learned_T: npt.NDArray[Any]) -> int:
    """Checksum of a sample's tokens (uint32) and which of them are learned (uint8)."""
    return zlib.crc32(learned_T.tobytes(), zlib.crc32(tokens_T.tobytes()))


def extension_of(data: bytes) -> str:
    """Return the usual extension of an image's format."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((extension for magic, extension in _MAGIC if data.startswith(magic)), "bin")
