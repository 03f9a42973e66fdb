"""Blocks of the indexes of a job that trains while its data are processed: how they are published, and read.

The opening says what is known before any sample: versions, tokenizer, held-out indexes, and how many blocks each
trained version will have. Then each block is published once, in order, when its ordinals are processed: create if
absent, so the objects are the journal of what loaders may have read. They lie under the key of the job's plan, which is
written at the end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import canonical_json, digest_value
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.format import WINDOWED, Shard, parse_plan, seal_plan

BLOCKS = "blocks"
"""Field of a plan: dataset reference -> samples and tokens of each block."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """An index that is still sealed, as it is known before its first block."""

    identity: str
    """What the data are, by what goes in: loader states name it."""
    manifest: str
    """Digest of a manifest without shards."""
    records: int
    blocks: int
    """Count of all blocks, in the end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is known of a job's data before any sample is."""

    references: Mapping[str, str]
    tokenizer: str
    manifests: Mapping[str, str]
    """Indexes that are finished: the held-out ones."""
    growing: Mapping[str, Growing]
    """By dataset reference."""
    pixels: int
    """How images become pixels (``index.format.PIXELS``)."""
    order: int = WINDOWED
    """How the windows of the order are cut (``index.format.ORDER``)."""

    def to_value(self) -> dict[str, Any]:
        """Return it as a JSON-able value."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_value(cls, value: Mapping[str, Any]) -> Opening:
        """Read it."""
        growing = {reference: Growing(**one) for reference, one in value["growing"].items()}
        return cls(**{**value, "growing": growing})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some ordinals in a row that are sealed."""

    group: str
    """Digest of the object that lists its shards."""
    samples: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Samples and tokens of the sealed blocks of an index, in order, and how many blocks it has in the end."""

    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    total: int

    @property
    def complete(self) -> bool:
        """Whether all are sealed."""
        return len(self.samples) == self.total

    def digest(self, count: int) -> str:
        """Digest of the first ``count`` blocks."""
        return digest_value([list(self.samples[:count]), list(self.tokens[:count])])

    def to_value(self) -> list[list[int]]:
        """Return it for a plan, once it is complete."""
        return [list(pair) for pair in zip(self.samples, self.tokens, strict=True)]

    @classmethod
    def from_value(cls, value: Sequence[Sequence[int]]) -> Sizes:
        """Read it from a plan."""
        return cls(tuple(pair[0] for pair in value), tuple(pair[1] for pair in value), len(value))


class Journal:
    """The opening and the blocks of one job's data.

    Args:
        store: Object store.
        plan_key: Key of the job's plan.
    """

    def __init__(self, store: ObjectStore, plan_key: str) -> None:
        self._store, self._folder = store, plan_key.removesuffix(".json")

    def opening(self) -> Opening | None:
        """Return the opening; None before it is there.

        Raises:
            IndexDamagedError: If its bytes are damaged.
        """
        value = self._read(f"{self._folder}/opening.json")
        return None if value is None else Opening.from_value(value)

    def open(self, opening: Opening) -> Opening:
        """Publish the opening; return the one that counts, which is the first."""
        try:
            self._store.put_if_absent(f"{self._folder}/opening.json", canonical_json(seal_plan(opening.to_value())))
        except ObjectExistsError:
            return self.opening() or opening
        return opening

    def block(self, place: int, number: int) -> Block | None:
        """Return a block; None before it is sealed.

        Args:
            place: Of its dataset reference, among those of the opening that grow, sorted.
            number: Counts from 0.

        Raises:
            IndexDamagedError: If its bytes are damaged.
        """
        value = self._read(self._key(place, number))
        return None if value is None else Block(**value)

    def append(self, place: int, number: int, block: Block) -> None:
        """Publish a block, once; a later one with the same samples may be written in another form.

        Raises:
            EnvironmentFailedError: If another run has published other samples under this number.
        """
        key, data = self._key(place, number), canonical_json(seal_plan(dataclasses.asdict(block)))
        try:
            self._store.put_if_absent(key, data)
            return
        except ObjectExistsError:
            pass
        try:
            known = self.block(place, number)
        except IndexDamagedError:
            known = None
        if known is not None and (known.samples, known.tokens) != (block.samples, block.tokens):
            raise EnvironmentFailedError(
                f"block {number} changed: {key} has {known.samples} samples and {known.tokens} tokens, processing now "
                f"makes {block.samples} and {block.tokens}; training may have read the first ones, so start the job "
                "again under another name"
            )
        if known != block:
            self._store.put(key, data)

    def _key(self, place: int, number: int) -> str:
        return f"{self._folder}/{place:04d}/{number:08d}.json"

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            return parse_plan(self._store.get(key), key.removeprefix("plans/"))
        except ObjectNotFoundError:
            return None


def shards_of(group: bytes) -> tuple[Shard, ...]:
    """Read the shards that a block's group lists."""
    return tuple(Shard.from_value(value) for value in json.loads(group)["shards"])
