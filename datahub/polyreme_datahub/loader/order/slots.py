"""Slots of a segment: which source and which of its samples each one takes, given where a window begins.

Slots 0, 1, 2, ... name a source each, by the weights; a source's samples come in epochs, each a keyed permutation of
those that fit the segment's packs. Behind a source's last turn, the slots are numbered from 0 again.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from polyreme_datahub.loader.order.mixture import Mixture, shares_of
from polyreme_datahub.loader.order.permutation import permute
from polyreme_datahub.loader.order.plan import BlockEnds, OrderPlan

MIXTURES_KEPT = 16
"""Mixtures in memory: tables of up to a MiB or two, of segments that follow each other."""

Place: TypeAlias = tuple[int, tuple[int, ...]]
"""A slot, and the turns of each source before slot 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One sample's turn."""

    source: int
    epoch: int
    sample: int
    """Place of the sample in its source."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A step that trains on a sample."""

    step: int
    pack: int
    source: str
    epoch: int
    """How often the source has come round before; counts from 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Slots in a row of the same sources."""

    first: int
    """Slots of the window before it."""
    slot: int
    base: tuple[int, ...]

    def place(self, used: int) -> Place:
        """Return where the next window begins, if this one takes so many slots."""
        return self.slot + used - self.first, self.base


class Slots:
    """The slots of a plan's segments."""

    def __init__(self, plan: OrderPlan) -> None:
        self._mixtures: OrderedDict[tuple[int, ...], Mixture] = OrderedDict()
        self.take(plan)

    def take(self, plan: OrderPlan) -> None:
        """Take over a plan with other segments."""
        self._plan = plan
        for segment in plan.segments:
            shares_of(segment.weights)
        fitting = {tokens: _fitting(plan, tokens) for tokens in {plan.tokens_in(of) for of in plan.segments}}
        self._fitting = [fitting[plan.tokens_in(segment)] for segment in plan.segments]
        """By segment and source: the samples that fit; None for all."""

    def extend(self, plan: OrderPlan) -> None:
        """Take over a plan in which more blocks are sealed."""
        self._plan = plan

    def turns(self, segment: int, slot: int, base: tuple[int, ...]) -> tuple[int, ...]:
        """Return the turns of each source before a slot."""
        mixture = self._mixture(segment, base)
        taken = (0,) * len(base) if mixture is None else mixture.taken(slot)
        return tuple(before + more for before, more in zip(base, taken, strict=True))

    def carry(self, segment: int, following: int, turns: Sequence[int]) -> tuple[int, ...]:
        """Carry each source's turns into the next segment; where other samples fit there, its next epoch begins."""
        base: list[int] = []
        for source, turn in enumerate(turns):
            size, next_size = self.size(segment, source), self.size(following, source)
            # Which samples fit depends on the tokens of a pack alone: equal counts mean the same samples.
            alike = size == next_size or not size or not next_size
            base.append(turn if alike else -(-turn // size) * next_size)
        return tuple(base)

    def size(self, segment: int, source: int) -> int:
        """Return how many samples of a source fit a segment's packs."""
        fitting = self._fitting[segment][source]
        return int(self._plan.lengths[source].size if fitting is None else fitting.size)

    def read(
        self, segment: int, place: Place, count: int
    ) -> tuple[Sequence[Slot], npt.NDArray[np.int64], Sequence[Stretch]]:
        """Return the samples of some slots, and their lengths; fewer where nothing more is sealed, or left."""
        slots: list[Slot] = []
        lengths, stretches = [np.zeros(0, np.int64)], []
        slot, base = place
        while len(slots) < count and (mixture := self._mixture(segment, base)) is not None:
            stretches.append(Stretch(len(slots), slot, base))
            want = self._until_last_turn(segment, mixture, slot, base, count - len(slots))
            found, length_N = self._samples(segment, mixture, slot, base, want)
            slots, lengths = [*slots, *found], [*lengths, length_N]
            if len(found) < want:
                break
            slot, base = 0, self.turns(segment, slot + want, base)
        return slots, np.concatenate(lengths), stretches

    def before_next_epoch(self, segment: int, place: Place, count: int) -> int:
        """Count the slots, at most so many, before the first one with which a source begins another epoch.

        That is an epoch after the one of its next turn. While a source is processed, the end of its first is not known.
        """
        slot, base = place
        ends = [self._epoch_end(segment, source, turn) for source, turn in enumerate(self.turns(segment, slot, base))]
        done = 0
        while done < count and (mixture := self._mixture(segment, base)) is not None:
            want = self._until_last_turn(segment, mixture, slot, base, count - done)
            left = [None if end is None else end - turn for end, turn in zip(ends, base, strict=True)]
            if (found := _before_turns(mixture, slot, want, left)) < want:
                return done + found
            done, slot, base = done + want, 0, self.turns(segment, slot + want, base)
        return count

    def _epoch_end(self, segment: int, source: int, turn: int) -> int | None:
        size = self.size(segment, source)
        return None if not size or self._plan.is_growing(source) else (turn // size + 1) * size

    def _mixture(self, segment: int, base: Sequence[int]) -> Mixture | None:
        """Return the mixture of the sources that have turns left; None if none has."""
        weights = self._plan.segments[segment].weights
        if self._plan.epochs_max:
            weights = tuple(0 if self._left(segment, at, base) == 0 else weight for at, weight in enumerate(weights))
        if not any(weights):
            return None
        if weights not in self._mixtures:
            self._mixtures[weights] = Mixture(weights)
        self._mixtures.move_to_end(weights)
        while len(self._mixtures) > MIXTURES_KEPT:
            self._mixtures.popitem(last=False)
        return self._mixtures[weights]

    def _left(self, segment: int, source: int, base: Sequence[int]) -> int | None:
        """Return how many turns a source has left in a segment; None: any number."""
        epochs = self._plan.epochs_max[source] if self._plan.epochs_max else None
        return None if epochs is None else max(0, epochs * self.size(segment, source) - base[source])

    def _until_last_turn(self, segment: int, mixture: Mixture, slot: int, base: Sequence[int], count: int) -> int:
        """Count the slots up to the one with which a source has had all its turns; at most so many."""
        if not self._plan.epochs_max:
            return count
        left = [self._left(segment, source, base) for source in range(len(base))]
        last = [None if turns is None else turns - 1 for turns in left]
        return min(count, _before_turns(mixture, slot, count, last) + 1)

    def _samples(
        self, segment: int, mixture: Mixture, slot: int, base: Sequence[int], count: int
    ) -> tuple[Sequence[Slot], npt.NDArray[np.int64]]:
        """Return the samples of slots of one mixture; fewer where the next one's block is not sealed."""
        source_N = mixture.sources(slot, count)
        taken = mixture.taken(slot)
        count = self._sealed_slots(source_N, base, taken)
        source_N = source_N[:count]
        sample_N, epoch_N, length_N = (np.empty(count, dtype=np.int64) for _ in range(3))
        for source, lengths in enumerate(self._plan.lengths):
            mine = np.flatnonzero(source_N == source)
            if not mine.size:
                continue
            turn = base[source] + taken[source] + np.arange(mine.size)
            fitting, size = self._fitting[segment][source], self.size(segment, source)
            blocks = self._plan.blocks_of(source)
            # Where blocks are missing, all these turns are in the first epoch.
            whole = blocks is None or blocks.complete
            epoch, position = np.divmod(turn, size) if whole else (np.zeros_like(turn), turn)
            for number in range(int(epoch[0]), int(epoch[-1]) + 1):
                now = epoch == number
                key = f"{self._plan.seed}:{self._plan.names[source]}:{number}"
                if blocks is not None and number == 0:
                    sample_N[mine[now]] = _in_blocks(position[now], blocks, key)
                    continue
                place = permute(position[now], size=size, key=key)
                sample_N[mine[now]] = place if fitting is None else fitting[place]
            epoch_N[mine] = epoch
            length_N[mine] = lengths[sample_N[mine]]
        slots = [Slot(*row) for row in zip(source_N.tolist(), epoch_N.tolist(), sample_N.tolist(), strict=True)]
        return slots, length_N

    def _sealed_slots(self, source_N: npt.NDArray[np.int64], base: Sequence[int], taken: Sequence[int]) -> int:
        """Count the slots before the first one whose block is not sealed."""
        count = source_N.size
        for source in range(len(self._plan.names)):
            blocks = self._plan.blocks_of(source)
            if blocks is None or blocks.complete:
                continue
            mine = np.flatnonzero(source_N == source)
            left = max(0, blocks.sealed - base[source] - taken[source])
            if mine.size > left:
                count = min(count, int(mine[left]))
        return count


def _before_turns(mixture: Mixture, slot: int, count: int, turns: Sequence[int | None]) -> int:
    """Count the slots from one on, at most so many, before the first of some turns, one of each source; None: none."""
    taken = mixture.taken(slot)
    for source, turn in enumerate(turns):
        share = mixture.share(source)
        # Any slots in a row hold each source's share within two samples.
        if turn is not None and share and turn - taken[source] < count * share + 2:
            count = min(count, mixture.slot_of(source, turn) - slot)
    return count


def _in_blocks(position: npt.NDArray[np.int64], blocks: BlockEnds, key: str) -> npt.NDArray[np.int64]:
    """Return the samples at positions of the first epoch: blocks in order, each permuted by itself."""
    ends = np.array(blocks.ends, dtype=np.int64)
    block = np.searchsorted(ends, position, side="right")
    found = np.empty_like(position)
    for number in np.unique(block):
        mine = block == number
        first = int(ends[number - 1]) if number else 0
        size = int(ends[number]) - first
        found[mine] = first + permute(position[mine] - first, size=size, key=f"{key}:block {number}")
    return found


def _fitting(plan: OrderPlan, tokens: int) -> list[npt.NDArray[np.int64] | None]:
    found: list[npt.NDArray[np.int64] | None] = []
    for lengths in plan.lengths:
        fits = lengths <= tokens
        found.append(None if fits.all() else np.flatnonzero(fits))
    return found
