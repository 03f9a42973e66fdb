"""A naive walker of a job's packs, written from the definitions of the order; it shares no code with the loader.

One sample at a time, without arrays, windows known in advance or anything remembered: slow and plain. Definitions:
the docstrings of ``loader.order.order``, ``slots`` and ``weighing``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, isqrt

WINDOW_PACKS = 256
ROUNDS = 6
WORD = 2**64 - 1

Visit = tuple[int, int, int]
"""Source, how often it has come round before, sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps with the same weights."""

    first_step: int
    weights: Sequence[int]
    skip_steps: int = 0
    """Steps of the phase before whose samples are passed over where this one begins."""


@dataclass(slots=True)
class Stand:
    """How far the sources are."""

    turns: list[int]
    """Of each source, from the beginning."""
    taken: list[int]
    """Of each source, since slots are counted."""
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What an order is made of; every sample fits a pack."""

    seed: int
    names: Sequence[str]
    lengths: Sequence[Sequence[int]]
    phases: Sequence[Phase]
    packs_per_step: int
    pack_tokens: int
    epochs_max: Sequence[int | None] = ()
    """Of each source; with any, the last window ends with ``last_step``."""
    last_step: int = 0

    def steps(self, count: int) -> Iterator[list[list[Visit]]]:
        """Yield the packs of steps 1, 2, ... ``count``."""
        none = [0] * len(self.names)
        stand = Stand(list(none), list(none))
        step = 1
        for number, phase in enumerate(self.phases):
            left = phase.skip_steps
            while left:
                passed = self._whole_steps(self.phases[number - 1], stand, min(left, self._window_steps()))
                self._filled(self.phases[number - 1], stand, passed * self.packs_per_step)
                left -= passed
            stand.taken, stand.slot = list(none), 0
            following = self.phases[number + 1].first_step if number + 1 < len(self.phases) else count + WINDOW_PACKS
            while step < following:
                if step > count:
                    return
                steps = self._window_steps() - (step - phase.first_step) % self._window_steps()
                steps = min(steps, following - step)
                if any(self.epochs_max):
                    steps = min(steps, self.last_step - step + 1)
                steps = self._whole_steps(phase, stand, steps)
                filled = self._filled(phase, stand, steps * self.packs_per_step)
                places = [_permuted(at, len(filled), f"{self.seed}:packs:{step}") for at in range(len(filled))]
                for at in range(steps):
                    if step + at <= count:
                        mine = places[at * self.packs_per_step : (at + 1) * self.packs_per_step]
                        yield [filled[place] for place in mine]
                step += steps

    def _window_steps(self) -> int:
        return max(1, WINDOW_PACKS // self.packs_per_step)

    def _whole_steps(self, phase: Phase, stand: Stand, most: int) -> int:
        """Count the steps before a source begins another epoch than that of its next turn: 1 to ``most``."""
        stand = Stand(list(stand.turns), list(stand.taken), stand.slot)
        epochs = [turns // len(of) for turns, of in zip(stand.turns, self.lengths, strict=True)]
        room, total = self.packs_per_step * self.pack_tokens, 0
        while total <= most * room:
            visit = self._next(phase, stand)
            if visit[1] != epochs[visit[0]]:
                return max(1, total // room)
            total += self._tokens(visit)
            self._take(stand, visit[0])
        return most

    def _filled(self, phase: Phase, stand: Stand, packs_max: int) -> list[list[Visit]]:
        """Return the packs of a window, and move past its samples."""
        visits = self._window(phase, Stand(list(stand.turns), list(stand.taken), stand.slot), packs_max)
        packs = _packed([self._tokens(visit) for visit in visits], self.pack_tokens, packs_max)
        for source, _, _ in visits[: sum(map(len, packs))]:
            self._take(stand, source)
        filled = [[visits[at] for at in pack] for pack in packs]
        return filled + [[] for _ in range(packs_max - len(filled))]

    def _tokens(self, visit: Visit) -> int:
        return self.lengths[visit[0]][visit[2]]

    def _most(self, source: int) -> int | None:
        epochs = self.epochs_max[source] if self.epochs_max else None
        return None if epochs is None else epochs * len(self.lengths[source])

    def _take(self, stand: Stand, source: int) -> None:
        stand.turns[source] += 1
        stand.taken[source] += 1
        stand.slot += 1
        if stand.turns[source] == self._most(source):
            stand.taken, stand.slot = [0] * len(self.names), 0

    def _window(self, phase: Phase, stand: Stand, packs: int) -> list[Visit]:
        """Return as many samples as would fit a window's packs without a gap."""
        visits: list[Visit] = []
        total = 0
        while True:
            visit = self._next(phase, stand)
            total += self._tokens(visit)
            if total > packs * self.pack_tokens:
                return visits
            visits.append(visit)
            self._take(stand, visit[0])

    def _next(self, phase: Phase, stand: Stand) -> Visit:
        """Return what takes the next slot."""
        weights = [
            0 if turns == self._most(source) else phase.weights[source] for source, turns in enumerate(stand.turns)
        ]
        source = _earliest_deadline(weights, stand.taken, stand.slot)
        size = len(self.lengths[source])
        epoch, position = divmod(stand.turns[source], size)
        return source, epoch, _permuted(position, size, f"{self.seed}:{self.names[source]}:{epoch}")


def whole_weights(weights: Sequence[int], lengths: Sequence[Sequence[int]]) -> list[int]:
    """Return the weights by which slots are given out for shares of tokens, at temperature 2."""
    shares = [
        Fraction(weight * isqrt(sum(of) * 10**80), 10**40) * len(of) / sum(of)
        for weight, of in zip(weights, lengths, strict=True)
    ]
    return [max(1, round(share * 65_536 / sum(shares))) if share else 0 for share in shares]


def _earliest_deadline(weights: Sequence[int], taken: Sequence[int], slot: int) -> int:
    """Return who takes a slot: of those whose next sample may come, the one that must come first."""
    whole = sum(weights)
    share = [Fraction(whole, weight) if weight else None for weight in weights]
    may = [
        (ceil((taken[source] + 1) * each), source)
        for source, each in enumerate(share)
        if each is not None and floor(taken[source] * each) <= slot
    ]
    return min(may)[1]


def _permuted(position: int, size: int, key: str) -> int:
    """Return a position's place in the permutation that a key names: a Feistel network, walked until inside."""
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    keys = struct.unpack(f"<{ROUNDS}Q", hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest())
    while True:
        left, right = position >> bits, position & mask
        for each in keys:
            mixed = ((right + each) & WORD) * 0x9E3779B97F4A7C15 & WORD
            mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & WORD
            left, right = right, left ^ ((mixed ^ (mixed >> 32)) & mask)
        position = left << bits | right
        if position < size:
            return position


def _packed(lengths: Sequence[int], capacity: int, packs_max: int) -> list[list[int]]:
    """Pack the longest prefix that needs no more packs than there are."""
    count = len(lengths)
    while True:
        packs = _best_fit(lengths[:count], capacity)
        over = sum(lengths[at] for pack in packs[packs_max:] for at in pack)
        if not over:
            return packs
        while over > 0:
            count -= 1
            over -= lengths[count]


def _best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, by looking at every pack."""
    packs: list[list[int]] = []
    free: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        fitting = [(free[pack], pack) for pack in range(len(packs)) if free[pack] >= lengths[at]]
        if not fitting:
            packs.append([])
            free.append(capacity)
        pack = min(fitting)[1] if fitting else len(packs) - 1
        packs[pack].append(at)
        free[pack] -= lengths[at]
    return [sorted(pack) for pack in packs]
