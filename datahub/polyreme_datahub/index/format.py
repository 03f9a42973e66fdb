"""The form of an index: a manifest (JSON) and shards (arrays end to end, each aligned), all content-addressed.

Only NumPy and the standard library: ranks read it. Shape suffixes: S = samples of a shard, T = tokens, P = patches, I
= images.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import IndexDamagedError

FORMAT = 2
ALIGN_BYTES = 64
ARRAYS: Mapping[str, str] = {
    "tokens_T": "<u4",
    "learned_T": "|u1",
    "token_offsets": "<i8",
    "prompt_tokens": "<i4",
    "patches_P": "|u1",
    "patch_offsets": "<i8",
    "grids_I2": "<i4",
    "image_offsets": "<i8",
    "checksums": "<u4",
    "ids": "|u1",
    "id_offsets": "<i8",
    "details": "|u1",
    "detail_offsets": "<i8",
}
"""Name and type of each array of a shard. Offsets have one entry more than there are samples."""
CONTENT = frozenset({"tokens_T", "learned_T", "patches_P"})
"""Held by a checksum a sample, so that damage costs one sample; the other arrays by one checksum a shard."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """Where an array lies in its shard."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Some samples in a row."""

    digest: str
    count: int
    size_bytes: int
    structure: int
    """Checksum of all that is not content: where samples begin, what they are called, the grids of their images."""
    arrays: tuple[ArrayPlace, ...]

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Shard:
        """Read a shard of a manifest's JSON."""
        arrays = tuple(
            ArrayPlace(name=place["name"], start=place["start"], shape=tuple(place["shape"]))
            for place in value["arrays"]
        )
        return cls(**{**value, "arrays": arrays})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An index."""

    version: str
    """Digest of the dataset version."""
    name: str
    number: int
    tokenizer: str
    vocabulary: int
    token_ids: Mapping[str, int]
    """``media``, ``end`` and ``pad``."""
    patch_px: int
    merge: int
    channels: int
    """1 when every page is gray: the loader repeats it."""
    sequence_tokens: int
    samples: int
    tokens: int
    shards: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        """Write the manifest in its one canonical form."""
        value = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            IndexDamagedError: If it is of another format.
        """
        value: dict[str, Any] = json.loads(data)
        if value.pop("format", None) != FORMAT:
            raise IndexDamagedError(f"index has another format version, expected {FORMAT}")
        shards = tuple(Shard.from_value(shard) for shard in value.pop("shards"))
        return cls(**value, shards=shards)


def lay_out(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[bytes, tuple[ArrayPlace, ...]]:
    """Put the arrays of a shard end to end."""
    parts, places, position = [], [], 0
    for name, kind in ARRAYS.items():
        data = np.ascontiguousarray(arrays[name], dtype=kind)
        gap = -position % ALIGN_BYTES
        parts += [b"\0" * gap, data.tobytes()]
        places.append(ArrayPlace(name=name, start=position + gap, shape=data.shape))
        position += gap + data.nbytes
    return b"".join(parts), tuple(places)


def checksum(tokens: npt.NDArray[Any], learned: npt.NDArray[Any], patches: npt.NDArray[Any]) -> int:
    """Checksum of all that a sample trains on."""
    return _crc32([tokens, learned, patches])


def structure_of(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    """Checksum of a shard's arrays that are not content."""
    return _crc32([np.ascontiguousarray(arrays[name], dtype=ARRAYS[name]) for name in ARRAYS if name not in CONTENT])


def _crc32(parts: Iterable[npt.NDArray[Any]]) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(np.ascontiguousarray(part).data, total)
    return total


def plan_key(job: str, data: Mapping[str, Any]) -> str:
    """Key of the object that tells ranks which indexes a job trains on."""
    return f"plans/{digest_value({'job': job, 'data': data})}.json"


def seal_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan object with the digest of its content."""
    return {**plan, "digest": digest_value(plan)}


def parse_plan(data: bytes, name: str) -> dict[str, Any]:
    """Read a plan object.

    Raises:
        IndexDamagedError: If it does not fit its own digest.
    """
    plan: dict[str, Any] = {}
    try:
        plan = json.loads(data)
        seen = plan.pop("digest")
        whole = bool(seen == digest_value(plan))
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise IndexDamagedError(f"stored data is damaged: plans/{name} does not fit its digest")
    return plan
