"""Frames between a sandbox and its child: a fixed prefix, a JSON header, and the raw bytes of blobs.

Every length is checked against a maximum before anything is read or allocated. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Generator, Mapping, Sequence
from typing import Any

PREFIX = struct.Struct("<4sIQ")
"""Magic, bytes of the header, bytes of all blobs."""
MAGIC = b"PRS1"
HEADER_BYTES_MAX = 256 * 2**20
BLOBS_MAX = 65_536
READ_BYTES = 2**20
"""Most bytes of one read; a pipe holds about as many."""


class FrameError(Exception):
    """Bytes that are no frame, or a frame over its maximum."""


def encode_frame(header: Mapping[str, Any], blobs: Mapping[str, bytes]) -> list[bytes]:
    """Write a frame as buffers that follow each other: a blob's bytes are not copied.

    Raises:
        FrameError: If there is more than a frame may hold.
    """
    listing = [[digest, len(data)] for digest, data in blobs.items()]
    head = json.dumps({**header, "blobs": listing}, separators=(",", ":"), ensure_ascii=False).encode()
    if len(head) > HEADER_BYTES_MAX or len(listing) > BLOBS_MAX:
        raise FrameError(
            f"frame has {len(head)} bytes of JSON and {len(listing)} blobs, expected at most "
            f"{HEADER_BYTES_MAX} and {BLOBS_MAX}"
        )
    return [PREFIX.pack(MAGIC, len(head), sum(size for _, size in listing)) + head, *blobs.values()]


Frame = tuple[dict[str, Any], dict[str, bytes]]


def read_frame(*, bytes_max: int) -> Generator[int, Sequence[bytes], Frame]:
    """Read a frame: yields how many bytes it needs next, is sent exactly these in pieces, returns header and blobs.

    Raises:
        FrameError: If the bytes are no frame, or one with more than ``bytes_max`` bytes of blobs.
    """
    magic, head_bytes, body_bytes = PREFIX.unpack(b"".join((yield PREFIX.size)))
    if magic != MAGIC or head_bytes > HEADER_BYTES_MAX or body_bytes > bytes_max:
        raise FrameError(
            f"not a frame, or too long: {magic!r}, {head_bytes} and {body_bytes} bytes, expected at most "
            f"{HEADER_BYTES_MAX} and {bytes_max}"
        )
    head = b"".join((yield head_bytes))
    try:
        header = json.loads(head)
        listing = header.pop("blobs")
        sizes = {str(digest): size for digest, size in listing}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FrameError(f"header of a frame is not valid: {error}") from error
    good = all(type(size) is int and size >= 0 for size in sizes.values()) and sum(sizes.values()) == body_bytes
    if not good or not len(listing) == len(sizes) <= BLOBS_MAX:
        raise FrameError(f"blobs of a frame do not add up to {body_bytes} bytes")
    blobs = {}
    for digest, size in sizes.items():
        pieces = (yield size) if size else ()
        blobs[digest] = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return header, blobs
