"""Borders of the work items that read a version: so many records, or so many bytes of its files.

They are cut once, when the version is registered, and kept in its description, so that every process has the same
ones. Pure.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from polyreme_datahub.errors import SourceInvalidError

CHUNK_RECORDS_MAX = 256
CHUNK_BYTES_MAX = 16 * 2**20
"""Bytes of the files of one chunk; a record of more bytes is a chunk by itself."""
FIELD = "chunks"
"""Name in a version's description."""


def cut(
    sizes: Iterable[int], *, records_max: int = CHUNK_RECORDS_MAX, bytes_max: int = CHUNK_BYTES_MAX
) -> Iterator[int]:
    """Yield the number of records of each chunk.

    Args:
        sizes: Bytes of each record, by ordinal.
        records_max: Most records of a chunk.
        bytes_max: Most bytes of a chunk of more than one record.
    """
    records = size_bytes = 0
    for size in sizes:
        if records and (records == records_max or size_bytes + size > bytes_max):
            yield records
            records = size_bytes = 0
        records += 1
        size_bytes += size
    if records:
        yield records


def encode_counts(counts: Iterable[int]) -> str:
    """Write the counts of records of all chunks as short text: two bytes each, compressed."""
    return base64.b64encode(zlib.compress(np.fromiter(counts, dtype="<u2").tobytes(), 9)).decode()


def chunks_of(source: Mapping[str, Any], records: int) -> Iterator[tuple[int, int]]:
    """Yield the first ordinal and the number of records of each chunk of a described source.

    Raises:
        SourceInvalidError: If the description has borders that do not cover the records.
    """
    if FIELD not in source:
        for first in range(0, records, CHUNK_RECORDS_MAX):
            yield first, min(CHUNK_RECORDS_MAX, records - first)
        return
    counts = np.frombuffer(zlib.decompress(base64.b64decode(source[FIELD])), dtype="<u2")
    borders = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
    if borders[-1] != records or (len(counts) and counts.min() == 0):
        raise SourceInvalidError(
            f"description of the source is damaged: its chunks have {borders[-1]} records, the version {records}"
        )
    for first, after in pairwise(borders.tolist()):
        yield first, after - first
