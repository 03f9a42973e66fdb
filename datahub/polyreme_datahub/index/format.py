"""The form of a plan index: a manifest (JSON) and shards (arrays end to end, each aligned), all content-addressed.

It holds what packing, the order and reports need: lengths in tokens, grids of images, names, details, and where the
encoded bytes of each sample lie. These lie in sample shards (plain tar files), and become a document when a rank needs
it. Only NumPy and the standard library: ranks read it. Shape suffixes: S = samples of a shard, I = images.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api.errors import RefusedError
from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import IndexDamagedError

FORMAT, FORMAT_OF_KIND = 3, 4
"""The second of an index whose kind is not that of conversations: earlier releases refuse it."""
PREFERENCES = "preferences"
"""Kind of an index whose samples are a prompt with a chosen and a rejected answer each."""
PIXELS = "pixels"
"""Field of a plan: how images become pixels. A plan of an earlier release has none."""
BY_PILLOW, BY_CONVOLUTION = 1, 2
"""Its values: resized by Pillow; by ``loader.sample.pixels``, decoded at a smaller scale where the size allows."""
ORDER = "order"
"""Field of a plan: how the windows of the order are cut. A plan of an earlier release has none."""
WINDOWED, EVEN = 1, 2
"""Its values: windows of 256 packs, in which a source may have several epochs; windows that end with the epochs of
their sources, so that after any step two samples of a source differ by at most one visit."""
STEPS = "steps"
"""Field of a plan: the steps that were counted for the epochs of its job, by their number."""
OLDEST: Mapping[str, int] = {PIXELS: BY_PILLOW, ORDER: WINDOWED}
"""What a plan without these fields means."""
NEWEST: Mapping[str, int] = {PIXELS: BY_CONVOLUTION, ORDER: EVEN}
"""What a job that begins gets."""
ALIGN_BYTES = 64
DIGEST_BYTES = 32
ARRAYS: Mapping[str, str] = {
    "token_counts": "<i4",
    "prompt_tokens": "<i4",
    "token_checks": "<u4",
    "grids_I2": "<i4",
    "image_offsets": "<i8",
    "places": "<i4",
    "starts": "<i8",
    "sizes": "<i8",
    "digests": "|u1",
    "ids": "|u1",
    "id_offsets": "<i8",
    "details": "|u1",
    "detail_offsets": "<i8",
    "token_starts": "<i4",
}
"""Name and type of each array of a shard. Offsets have one entry more than there are samples. ``places`` counts the
shard's sample shards, ``starts`` and ``sizes`` are bytes in them, ``digests`` is [S, DIGEST_BYTES]: sha256.
``token_starts`` is there only in a shard with a piece of a sample that is not its first one: its first token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """Where an array lies in its shard."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleShard:
    """A tar file with the encoded bytes of samples."""

    digest: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Some samples in a row."""

    digest: str
    count: int
    size_bytes: int
    structure: int
    """Checksum of all arrays."""
    arrays: tuple[ArrayPlace, ...]
    samples: tuple[SampleShard, ...]
    """Where the encoded bytes of its samples lie."""

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Shard:
        """Read a shard of a manifest's JSON."""
        arrays = tuple(
            ArrayPlace(name=place["name"], start=place["start"], shape=tuple(place["shape"]))
            for place in value["arrays"]
        )
        samples = tuple(SampleShard(**shard) for shard in value["samples"])
        return cls(**{**value, "arrays": arrays, "samples": samples})


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
    sequence_tokens: int
    samples: int
    tokens: int
    shards: tuple[Shard, ...]
    kind: str = ""
    """What its samples are: ``PREFERENCES``, or conversations."""

    @property
    def reference(self) -> str:
        """Name and number of the dataset's version."""
        return f"{self.name}@{self.number}"

    @property
    def sample_shards(self) -> dict[str, int]:
        """Digests and sizes of the tar files with its samples, in order."""
        return {of.digest: of.size_bytes for shard in self.shards for of in shard.samples}

    def to_bytes(self) -> bytes:
        """Write the manifest in its one canonical form."""
        value = {"format": FORMAT_OF_KIND if self.kind else FORMAT, **dataclasses.asdict(self)}
        if not self.kind:
            del value["kind"]
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            IndexDamagedError: If it is of another format.
        """
        value: dict[str, Any] = json.loads(data)
        if (found := value.pop("format", None)) not in {FORMAT, FORMAT_OF_KIND}:
            raise IndexDamagedError(
                f"index has format {found}, this version reads {FORMAT_OF_KIND}: process the job's data again with the "
                "command that started it"
            )
        shards = tuple(Shard.from_value(shard) for shard in value.pop("shards"))
        return cls(**value, shards=shards)


def special_tokens(data: bytes) -> dict[str, int]:
    """Return the special tokens that a manifest names; every format has them in the same place."""
    return dict(json.loads(data)["token_ids"])


def lay_out(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[bytes, tuple[ArrayPlace, ...]]:
    """Put the arrays of a shard end to end."""
    parts, places, position = [], [], 0
    for name, kind in ARRAYS.items():
        if name not in arrays:
            continue
        data = np.ascontiguousarray(arrays[name], dtype=kind)
        gap = -position % ALIGN_BYTES
        parts += [b"\0" * gap, data.tobytes()]
        places.append(ArrayPlace(name=name, start=position + gap, shape=data.shape))
        position += gap + data.nbytes
    return b"".join(parts), tuple(places)


def structure_of(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    """Checksum of a shard's arrays."""
    total = 0
    for name in ARRAYS:
        if name in arrays:
            total = zlib.crc32(np.ascontiguousarray(arrays[name], dtype=ARRAYS[name]).data, total)
    return total


def steps_in(plan: Mapping[str, Any], epochs: int) -> int | None:
    """Return the steps that were counted for so many epochs of a plan's data; None before."""
    steps = plan.get(STEPS, {}).get(str(epochs))
    return None if steps is None else int(steps)


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


def pixels_of(plan: Mapping[str, Any]) -> int:
    """Return how images become pixels.

    Raises:
        RefusedError: If only a newer release knows.
    """
    return _version(plan, PIXELS, "images become pixels")


def order_of(plan: Mapping[str, Any]) -> int:
    """Return how the windows of the order are cut.

    Raises:
        RefusedError: If only a newer release knows.
    """
    return _version(plan, ORDER, "samples are ordered")


def _version(plan: Mapping[str, Any], field: str, what: str) -> int:
    found, newest = plan.get(field, OLDEST[field]), NEWEST[field]
    if found not in range(OLDEST[field], newest + 1):
        raise RefusedError(
            f"{what} in a way of a newer release: {found!r}, this release reads up to {newest}; use the newer one"
        )
    return int(found)
