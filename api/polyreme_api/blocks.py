"""Checksums of a file by blocks, so that a reader of a range verifies what it reads and nothing else.

CRC-32 (zlib): it finds damage, such as a flipped bit or a torn write; it is no defence against an attacker.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers; the last block of a file may be shorter."""


def checksums(data: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """Return the checksum of each block of ``data``, which begins at a block's begin."""
    view = memoryview(data).cast("B")
    return tuple(zlib.crc32(view[begin : begin + BLOCK_BYTES]) for begin in range(0, len(view), BLOCK_BYTES))


def checksums_of_parts(parts: Iterable[bytes | memoryview]) -> tuple[int, ...]:
    """Return the checksum of each block of parts that follow one another."""
    found: list[int] = []
    checksum, left = 0, BLOCK_BYTES
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            checksum = zlib.crc32(view[:left], checksum)
            taken = min(left, len(view))
            view, left = view[taken:], left - taken
            if not left:
                found.append(checksum)
                checksum, left = 0, BLOCK_BYTES
    return tuple(found) if left == BLOCK_BYTES else (*found, checksum)


def aligned(begin: int, end: int, size: int) -> tuple[int, int]:
    """Widen a range to whole blocks of a file of ``size`` bytes."""
    return begin // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, size)


def first_difference(data: bytes | bytearray | memoryview, expected: Sequence[int], *, begin: int) -> str:
    """Describe the first damaged block of a part of a file; empty if there is none.

    Args:
        data: Whole blocks.
        expected: Checksums of all blocks of the file.
        begin: Where ``data`` begins in the file, at a block's begin.
    """
    first = begin // BLOCK_BYTES
    for number, seen in enumerate(checksums(data), start=first):
        if seen != expected[number]:
            at = number * BLOCK_BYTES
            return f"bytes from {at}: expected crc32 {expected[number]:08x}, seen {seen:08x}"
    return ""
