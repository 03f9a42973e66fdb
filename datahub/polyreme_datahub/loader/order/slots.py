"""Slots of a segment: which source and which of its samples each one takes, given where a window begins.

Slots 0, 1, 2, ... name a source each, by integer weights: every prefix holds each source's share within one sample.
Slots are jobs of periodic tasks on one machine, taken by earliest deadline (Pfair: S. Baruah, N. Cohen, G. Plaxton,
D. Varvel, "Proportionate progress", 1996): source i's sample j may not come before slot floor(j W / w) nor after slot
ceil((j + 1) W / w) - 1, so no count ever differs from its share by one or more. All is integer arithmetic over one
tabulated period. After a source's last turn, the slots are numbered from 0 again.

A source's samples come in epochs, each a keyed permutation of those that fit the segment's packs, in O(1) memory: a
Feistel network over the next power of four, walked until inside. It is own arithmetic rather than ``numpy.random``:
the order of a run must not change with a NumPy release (NEP 19 promises no streams).
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyreme_api.job.schedule import PERIOD_MAX
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.loader.order.plan import BlockEnds, OrderPlan

MIXTURES_KEPT = 16
"""Mixtures in memory: tables of up to a MiB or two, of segments that follow each other."""
ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFTS = (np.uint64(29), np.uint64(32))

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


def shares_of(weights: Sequence[int]) -> list[int]:
    """Return the slots of each source in one period.

    Raises:
        SourceInvalidError: If there is no weight, or the period is too long.
    """
    divisor = math.gcd(*weights)
    if divisor == 0:
        raise SourceInvalidError("every weight of the mixture is 0; raise one", field="data.sources")
    shares = [weight // divisor for weight in weights]
    if (period := sum(shares)) > PERIOD_MAX:
        raise SourceInvalidError(
            f"mixture weights repeat only after {period} samples, expected at most {PERIOD_MAX}; use smaller "
            "or rounder weights",
            field="data.sources",
        )
    return shares


class Mixture:
    """The sources of slots 0, 1, 2, ... under fixed weights."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._shares = shares_of(weights)
        self.period = sum(self._shares)
        self._source_N = _tabulate(self._shares, self.period)

    def share(self, source: int) -> float:
        """Return a source's share of the slots."""
        return self._shares[source] / self.period

    def slot_of(self, source: int, turn: int) -> int:
        """Return the slot of a source's turn; both count from 0, and the source has a weight."""
        rounds, rest = divmod(turn, self._shares[source])
        return rounds * self.period + int(np.flatnonzero(self._source_N == source)[rest])

    def sources(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the source of each of ``count`` slots from ``first`` on."""
        return self._source_N[(first + np.arange(count)) % self.period].astype(np.int64)

    def taken(self, slots: int) -> list[int]:
        """Return how many of the first ``slots`` slots each source has."""
        rounds, rest = divmod(slots, self.period)
        # Counted once a window, some milliseconds: a table of every prefix would grow with sources times period.
        before_K = np.bincount(self._source_N[:rest], minlength=len(self._shares))
        return [rounds * share + int(before) for share, before in zip(self._shares, before_K, strict=True)]


def _tabulate(shares: Sequence[int], period: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    waiting = [(0, source) for source, share in enumerate(shares) if share]
    eligible: list[tuple[int, int]] = []
    taken = [0] * len(shares)
    table = np.empty(period, dtype=np.min_scalar_type(len(shares)))
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source = heapq.heappop(waiting)
            heapq.heappush(eligible, (-(-(taken[source] + 1) * period // shares[source]), source))
        _, source = heapq.heappop(eligible)
        table[slot] = source
        taken[source] += 1
        if taken[source] < shares[source]:
            heapq.heappush(waiting, (taken[source] * period // shares[source], source))
    return table


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
        fitting = {tokens: _fitting(plan, tokens) for tokens in {plan.sample_tokens_in(of) for of in plan.segments}}
        self._fitting = [fitting[plan.sample_tokens_in(segment)] for segment in plan.segments]
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
        """Return the samples of some slots, and the tokens that each takes; fewer where no more is sealed, or left."""
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
            length_N[mine] = lengths[sample_N[mine]] + self._plan.segments[segment].answer_room
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


def permute(positions: npt.NDArray[np.int64], *, size: int, key: str) -> npt.NDArray[np.int64]:
    """Return where each position goes in the permutation of ``0..size-1`` that ``key`` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = _round_keys(key)
    values = positions.astype(np.uint64)
    todo = np.arange(values.size)
    while todo.size:
        left, right = values[todo] >> half, values[todo] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(value: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = (value + key) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX
    return mixed ^ (mixed >> _SHIFTS[1])


def _round_keys(key: str) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
