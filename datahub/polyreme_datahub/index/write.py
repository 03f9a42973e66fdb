"""Writes a plan index and the sample shards that it names: samples by ordinal, cut into shards by bytes.

The same samples give the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.index.format import DIGEST_BYTES, SampleShard, Shard, lay_out, structure_of
from polyreme_datahub.index.pieces import Piece
from polyreme_datahub.index.sample_bytes import sample_bytes
from polyreme_datahub.index.tar_shards import SHARD_BYTES_MAX, SampleFiles, ShardBuilder, members_of, size_of
from polyreme_datahub.lakehouse import Lakehouse

ROWS_MAX = 65_536
"""Samples of one shard of the index."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSample:
    """A sample as it enters the index."""

    ordinal: int
    sample_id: str
    record: Mapping[str, Any]
    encoded: Mapping[str, Any]
    """What ``tokenize`` made."""
    pages: Sequence[Mapping[str, Any]]
    """Pages of ``compose``."""
    images: Mapping[str, bytes]
    """Bytes of the pages' images, by digest."""
    shapes: Mapping[str, Sequence[Any]]
    """Boxes, points and polygons, in pixels of their pages."""
    pieces: Sequence[tuple[Piece, int]] = ()
    """Pieces of a sample that is too long, each with the checksum of its tokens; none: it is whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    sample_id: str
    encoded: Mapping[str, Any]
    grids: Sequence[Sequence[int]]
    details: bytes
    place: int
    start: int
    size: int
    digest: str
    token_start: int = 0
    """Of a piece: its first token."""


def write_shards(
    lakehouse: Lakehouse, samples: Iterable[IndexedSample], *, patch_px: int
) -> tuple[tuple[Shard, ...], int]:
    """Store the shards of some samples; return them and the count of tokens."""
    shards: list[Shard] = []
    rows: list[_Row] = []
    stored: list[SampleShard] = []
    builder = ShardBuilder()
    tokens = 0
    for sample in samples:
        if len(rows) >= ROWS_MAX:
            shards.append(_put_shard(lakehouse, rows, [*stored, _put_samples(lakehouse, builder)]))
            rows, stored, builder = [], [], ShardBuilder()
        grids = [[page["height"] // patch_px, page["width"] // patch_px] for page in sample.pages]
        cut = grids if sample.pieces else None
        files = sample_bytes(sample.record, sample.pages, sample.images, sample.shapes, cut)
        key = f"{sample.ordinal:012d}"
        members = members_of(SampleFiles(key=key, files=files))
        if builder.keys and builder.size_bytes + size_of(members) > SHARD_BYTES_MAX:
            stored.append(_put_samples(lakehouse, builder))
            builder = ShardBuilder()
        start, size, digest = builder.add(key, members)
        row = _row(sample, (len(stored), start, size, digest), grids)
        made = [_row_of_piece(row, *piece) for piece in sample.pieces] or [row]
        rows += made
        tokens += sum(each.encoded["tokens"] for each in made)
    if rows:
        shards.append(_put_shard(lakehouse, rows, [*stored, _put_samples(lakehouse, builder)]))
    return tuple(shards), tokens


def _put_samples(lakehouse: Lakehouse, builder: ShardBuilder) -> SampleShard:
    digest, size_bytes = builder.store_plain(lakehouse)
    return SampleShard(digest=digest, size_bytes=size_bytes)


def _row_of_piece(row: _Row, piece: Piece, check: int) -> _Row:
    encoded = {**row.encoded, "tokens": piece.stop - piece.start, "check": check}
    grids = [row.grids[image] for image in piece.images]
    return dataclasses.replace(row, encoded=encoded, grids=grids, token_start=piece.start)


def _row(sample: IndexedSample, place: tuple[int, int, int, str], grids: Sequence[Sequence[int]]) -> _Row:
    details = {
        "question": sample.encoded["question"],
        "expected": sample.encoded["expected"],
        **sample.shapes,
    }
    return _Row(
        sample_id=sample.sample_id,
        encoded=sample.encoded,
        grids=grids,
        details=canonical_json(details),
        place=place[0],
        start=place[1],
        size=place[2],
        digest=place[3],
    )


def _put_shard(lakehouse: Lakehouse, rows: Sequence[_Row], samples: Sequence[SampleShard]) -> Shard:
    ids = [row.sample_id.encode() for row in rows]
    digests = b"".join(bytes.fromhex(row.digest) for row in rows)
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_counts": np.array([row.encoded["tokens"] for row in rows]),
        "prompt_tokens": np.array([row.encoded["prompt"] for row in rows]),
        "token_checks": np.array([row.encoded["check"] for row in rows], dtype=np.uint32),
        "grids_I2": np.array([grid for row in rows for grid in row.grids], dtype=np.int32).reshape(-1, 2),
        "image_offsets": _offsets([len(row.grids) for row in rows]),
        "places": np.array([row.place for row in rows]),
        "starts": np.array([row.start for row in rows]),
        "sizes": np.array([row.size for row in rows]),
        "digests": np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        "ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
        "id_offsets": _offsets([len(name) for name in ids]),
        "details": np.frombuffer(b"".join(row.details for row in rows), dtype=np.uint8),
        "detail_offsets": _offsets([len(row.details) for row in rows]),
    }
    if any(row.token_start for row in rows):
        arrays["token_starts"] = np.array([row.token_start for row in rows])
    data, places = lay_out(arrays)
    return Shard(
        digest=lakehouse.put_blob(data),
        count=len(rows),
        size_bytes=len(data),
        structure=structure_of(arrays),
        arrays=places,
        samples=tuple(samples),
    )


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
