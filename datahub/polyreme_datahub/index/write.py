"""Writes an index: samples by ordinal, cut into shards by bytes. The same samples give the same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.index.format import Shard, checksum, lay_out, structure_of
from polyreme_datahub.index.pictures import page_reference
from polyreme_datahub.lakehouse import Lakehouse

SHARD_BYTES_MAX = 64 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexedSample:
    """A sample as it enters the index."""

    sample_id: str
    encoded: Mapping[str, Any]
    """What ``tokenize`` made."""
    pages: Sequence[Mapping[str, Any]]
    """Pages of ``compose``."""
    patches: Sequence[bytes]
    """Patches of each page."""
    boxes: Sequence[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    sample_id: str
    tokens_T: npt.NDArray[np.uint32]
    learned_T: npt.NDArray[np.uint8]
    prompt_tokens: int
    patches_P: npt.NDArray[np.uint8]
    grids_I2: npt.NDArray[np.int32]
    details: bytes

    @property
    def size_bytes(self) -> int:
        return self.tokens_T.nbytes + self.learned_T.nbytes + self.patches_P.nbytes + len(self.details)


def write_shards(
    lakehouse: Lakehouse, samples: Iterable[IndexedSample], *, patch_px: int, channels: int
) -> tuple[tuple[Shard, ...], int]:
    """Store the shards of some samples; return them and the count of tokens."""
    shards: list[Shard] = []
    waiting: list[_Row] = []
    size_bytes = tokens = 0
    for sample in samples:
        row = _row(sample, patch_px=patch_px, channels=channels)
        if waiting and size_bytes + row.size_bytes > SHARD_BYTES_MAX:
            shards.append(_put_shard(lakehouse, waiting))
            waiting, size_bytes = [], 0
        waiting.append(row)
        size_bytes += row.size_bytes
        tokens += row.tokens_T.size
    if waiting:
        shards.append(_put_shard(lakehouse, waiting))
    return tuple(shards), tokens


def _patches(page: Mapping[str, Any], data: bytes, *, patch_px: int, channels: int) -> npt.NDArray[np.uint8]:
    """Return a page's patches [patches, channels * side * side]; a gray page in a coloured index is repeated."""
    patches_P = np.frombuffer(data, dtype=np.uint8).reshape(-1, page["channels"] * patch_px * patch_px)
    return patches_P if page["channels"] == channels else np.tile(patches_P, (1, channels))


def _row(sample: IndexedSample, *, patch_px: int, channels: int) -> _Row:
    tokens_T = np.array(sample.encoded["tokens"], dtype=np.uint32)
    learned_T = np.zeros(tokens_T.size, dtype=np.uint8)
    for start, stop in sample.encoded["learned"]:
        learned_T[start:stop] = 1
    cut = [
        _patches(page, data, patch_px=patch_px, channels=channels)
        for page, data in zip(sample.pages, sample.patches, strict=True)
    ]
    grids = [[page["height"] // patch_px, page["width"] // patch_px] for page in sample.pages]
    details = {
        "question": sample.encoded["question"],
        "expected": sample.encoded["expected"],
        "pages": [page_reference(page, patch_px=patch_px) for page in sample.pages],
        "boxes": list(sample.boxes),
    }
    return _Row(
        sample_id=sample.sample_id,
        tokens_T=tokens_T,
        learned_T=learned_T,
        prompt_tokens=sample.encoded["prompt"],
        patches_P=np.concatenate(cut) if cut else np.zeros((0, channels * patch_px * patch_px), dtype=np.uint8),
        grids_I2=np.array(grids, dtype=np.int32).reshape(-1, 2),
        details=canonical_json(details),
    )


def _put_shard(lakehouse: Lakehouse, rows: Sequence[_Row]) -> Shard:
    ids = [row.sample_id.encode() for row in rows]
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens_T": np.concatenate([row.tokens_T for row in rows]),
        "learned_T": np.concatenate([row.learned_T for row in rows]),
        "token_offsets": _offsets([row.tokens_T.size for row in rows]),
        "prompt_tokens": np.array([row.prompt_tokens for row in rows]),
        "patches_P": np.concatenate([row.patches_P for row in rows]),
        "patch_offsets": _offsets([len(row.patches_P) for row in rows]),
        "grids_I2": np.concatenate([row.grids_I2 for row in rows]),
        "image_offsets": _offsets([len(row.grids_I2) for row in rows]),
        "checksums": np.array([checksum(row.tokens_T, row.learned_T, row.patches_P) for row in rows], dtype=np.uint32),
        "ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
        "id_offsets": _offsets([len(name) for name in ids]),
        "details": np.frombuffer(b"".join(row.details for row in rows), dtype=np.uint8),
        "detail_offsets": _offsets([len(row.details) for row in rows]),
    }
    data, places = lay_out(arrays)
    return Shard(
        digest=lakehouse.put_blob(data),
        count=len(rows),
        size_bytes=len(data),
        structure=structure_of(arrays),
        arrays=places,
    )


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
