"""The order of a run: which sample lies in which pack of which step, as a pure function of (plan, step).

Slots 0, 1, 2, ... of a segment (steps with the same weights and packs) name a source each; a source's samples come in
epochs, each a keyed permutation. Samples that are longer than a segment's packs have no turn in it: an epoch is one of
those that fit. Where other samples fit than in the segment before, a source begins its next epoch. A source with a
limit of epochs has no turn after its last one: the slots behind it are numbered from 0 again, and go to the others by
their weights.

A window is a whole number of steps: as many slots as its packs hold are packed together, and the packs are shuffled. A
window begins where the one before ended, so its first slot depends on the lengths before it: first slots are found
forwards once and remembered, and the state of a checkpoint bears the one that it needs, so that a resume packs a single
window. Nothing depends on how many ranks ask, or in which order.

A source in blocks may still be processed. Its first epoch takes the blocks in order, each a keyed permutation of
itself, so a window needs no block beyond the one that fills it, and blocks that are sealed later only add windows. What
needs a block that is not sealed raises; the order never depends on which ones are.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyreme_api.errors import NotSealedError
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.loader.mixture import Mixture, shares_of
from polyreme_datahub.loader.order_plan import BlockEnds, OrderPlan, unfilled_segments, used_up
from polyreme_datahub.loader.packing import longest_prefix
from polyreme_datahub.loader.permutation import permute
from polyreme_planner.mixture import WINDOW_PACKS, window_steps

WINDOWS_KEPT = 4
"""Filled windows in memory."""
MIXTURES_KEPT = 16
"""Mixtures in memory: tables of up to a MiB or two, of segments that follow each other."""
WINDOWS_KNOWN_MAX = 4096
"""Beginnings of windows in memory; beyond, every other one is forgotten and found again from the one before."""
ORDER_VERSION = 1
"""Goes up when the same plan gives other packs: states of another version are refused."""
SLOTS_PER_PACK_MIN = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One sample's turn."""

    source: int
    epoch: int
    sample: int
    """Place of the sample in its source."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    segment: int
    first_step: int
    steps: int
    slot: int
    """First slot, counted within the segment, or since a source of it had its last turn."""
    base: tuple[int, ...]
    """Turns of each source before slot 0: whole epochs of the samples that fit, and what is left."""
    after: tuple[int, int, tuple[int, ...]] | None = None
    """Of a segment's first window: segment, next slot and base of the window before. What a segment's beginning passes
    over may still be added to until one of its steps was trained."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Slots in a row of the same sources."""

    first: int
    """Slots of the window before it."""
    slot: int
    base: tuple[int, ...]

    def place(self, used: int) -> _Place:
        """Return where the next window begins, if this one takes so many slots."""
        return self.slot + used - self.first, self.base


_Place: TypeAlias = tuple[int, tuple[int, ...]]
"""A slot, and the turns before slot 0."""


class Order:
    """Packs of slots, by step."""

    def __init__(self, plan: OrderPlan, *, window_packs: int = WINDOW_PACKS) -> None:
        self._window_packs = window_packs
        self._mixtures: OrderedDict[tuple[int, ...], Mixture] = OrderedDict()
        self._take(plan)
        self._known = [self._window(0, 1, 0, (0,) * len(plan.names))]
        self._filled: OrderedDict[int, tuple[_Place, list[list[Slot]]]] = OrderedDict()

    def extend(self, plan: OrderPlan) -> None:
        """Take over a plan in which more blocks are sealed; everything known stays as it is."""
        self._plan = plan
        self._check()

    def amend(self, plan: OrderPlan, *, from_step: int) -> None:
        """Take over a plan with other weights from a step on, with which a window begins; earlier steps stay."""
        self._take(plan)
        self._known = [window for window in self._known if window.first_step < from_step]
        for step in [step for step in self._filled if step >= from_step]:
            del self._filled[step]

    def _take(self, plan: OrderPlan) -> None:
        self._plan = plan
        for segment in plan.segments:
            shares_of(segment.weights)
        fitting = {tokens: _fitting(plan, tokens) for tokens in {plan.tokens_in(of) for of in plan.segments}}
        self._fitting = [fitting[plan.tokens_in(segment)] for segment in plan.segments]
        """By segment and source: the samples that fit; None for all."""
        self._check()

    def blocks_before(self, step: int) -> list[int]:
        """Count the blocks of each source that the window of a step follows, in the first epoch."""
        window = self._find(step)
        found: list[int] = []
        for source, turns in enumerate(self._turns(window.segment, window.slot, window.base)):
            blocks = self._plan.blocks_of(source)
            ends = () if blocks is None else blocks.ends
            found.append(min(len(ends), bisect.bisect_left(ends, turns) + 1) if turns else 0)
        return found

    def packs(self, step: int) -> list[list[Slot]]:
        """Return the samples of each pack of a step; a pack may be empty where the window runs short.

        Raises:
            NotSealedError: If the window of the step needs a block that is not sealed yet.
        """
        window = self._find(step)
        packs, count = self._fill(window)[1], self._plan.packs_in(self._plan.segments[window.segment])
        first = (step - window.first_step) * count
        return packs[first : first + count]

    def place(self, step: int) -> dict[str, object]:
        """Say in some JSON-able numbers where the window of a step begins; ``jump`` takes them."""
        window = self._find(step)
        segment, slot, base = window.segment, window.slot, window.base
        if step == window.first_step and window.after is not None:
            segment, slot, base = window.after
        return {"segment": segment, "step": window.first_step, "slot": slot, "base": list(base)}

    def jump(self, place: Mapping[str, Any]) -> bool:
        """Take over where a window begins, so that its steps need no walk from step 1.

        The place may be one of a plan that is the same up to there and that a change was appended to: the window that
        was to follow is then the first of the change's segment.

        Returns:
            False if the numbers can't be a window of this plan; then nothing has changed.
        """
        base = place.get("base")
        numbers = [
            place.get("segment"),
            place.get("step"),
            place.get("slot"),
            *(base if isinstance(base, list) else ()),
        ]
        whole = [number for number in numbers if type(number) is int and number >= 0]
        if len(numbers) != 3 + len(self._plan.names) or len(whole) != len(numbers):
            return False
        segment, step, slot = whole[:3]
        if segment >= len(self._plan.segments):
            return False
        passed, base = step - self._plan.segments[segment].first_step, tuple(whole[3:])
        # Slots count from 0 in a segment's first window, and behind a source's last turn.
        if passed < 0 or (passed == 0 and slot) or (passed and not slot and not self._plan.epochs_max):
            return False
        if passed % self._window_steps(segment) and not self._begins(segment + 1, step):
            return False
        window = self._window_at(segment, step, slot, base)
        if window.steps < 1:
            return False
        self._keep(window)
        return True

    def _find(self, step: int) -> _Window:
        if step < 1:
            raise SourceInvalidError(f"no step {step}: steps count from 1")
        at = bisect.bisect_right(self._known, step, key=lambda window: window.first_step) - 1
        window = self._known[at]
        while window.first_step + window.steps <= step:
            window = self._following(window)
            self._keep(window)
        return window

    def _keep(self, window: _Window) -> None:
        at = bisect.bisect_left(self._known, window.first_step, key=lambda known: known.first_step)
        if at < len(self._known) and self._known[at].first_step == window.first_step:
            return
        self._known.insert(at, window)
        if len(self._known) > WINDOWS_KNOWN_MAX:
            self._known = [known for at, known in enumerate(self._known) if at % 2 == 0 or known is window]

    def _following(self, window: _Window) -> _Window:
        slot, base = self._fill(window)[0]
        return self._window_at(window.segment, window.first_step + window.steps, slot, base)

    def _window_at(self, segment: int, step: int, slot: int, base: tuple[int, ...]) -> _Window:
        """Return the window of a step, given where the one before it ended in its segment."""
        following = segment + 1
        if self._begins(following, step):
            turns = self._turns(segment, *self._passed_over(segment, step, slot, base))
            window = self._window(following, step, 0, self._base(segment, following, turns))
            return dataclasses.replace(window, after=(segment, slot, base))
        return self._window(segment, step, slot, base)

    def _begins(self, segment: int, step: int) -> bool:
        return segment < len(self._plan.segments) and self._plan.segments[segment].first_step == step

    def _passed_over(self, segment: int, step: int, slot: int, base: tuple[int, ...]) -> _Place:
        """Return the place behind the samples that a segment's end passes over: of the steps that would follow."""
        left = self._plan.segments[segment + 1].skip_steps
        while left:
            window = _Window(segment, step, min(left, self._window_steps(segment)), slot, base)
            slot, base = self._packed(window)[0]
            step, left = step + window.steps, left - window.steps
        return slot, base

    def _turns(self, segment: int, slot: int, base: tuple[int, ...]) -> tuple[int, ...]:
        """Return the turns of each source before a slot."""
        mixture = self._mixture(segment, base)
        taken = (0,) * len(base) if mixture is None else mixture.taken(slot)
        return tuple(before + more for before, more in zip(base, taken, strict=True))

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
        return None if epochs is None else max(0, epochs * self._size(segment, source) - base[source])

    def _base(self, segment: int, following: int, turns: Sequence[int]) -> tuple[int, ...]:
        """Carry each source's turns into the next segment; where other samples fit there, its next epoch begins."""
        base: list[int] = []
        for source, turn in enumerate(turns):
            size, next_size = self._size(segment, source), self._size(following, source)
            # What fits is told by the tokens of a pack alone, so as many are the same ones. None have no turn.
            alike = size == next_size or not size or not next_size
            base.append(turn if alike else -(-turn // size) * next_size)
        return tuple(base)

    def _size(self, segment: int, source: int) -> int:
        fitting = self._fitting[segment][source]
        return int(self._plan.lengths[source].size if fitting is None else fitting.size)

    def _window_steps(self, segment: int) -> int:
        return window_steps(self._plan.packs_in(self._plan.segments[segment]), self._window_packs)

    def _window(self, segment: int, first_step: int, slot: int, base: tuple[int, ...]) -> _Window:
        segments, steps = self._plan.segments, self._window_steps(segment)
        if segment + 1 < len(segments):
            steps = min(steps, segments[segment + 1].first_step - first_step)
        if self._plan.last_step is not None and not self._is_over(first_step):
            steps = min(steps, self._plan.last_step - first_step + 1)
        return _Window(segment, first_step, steps, slot, base)

    def _is_over(self, step: int) -> bool:
        return self._plan.last_step is not None and step > self._plan.last_step

    def _fill(self, window: _Window) -> tuple[_Place, list[list[Slot]]]:
        """Return where the window after this one begins, and the packs of this one."""
        if window.first_step in self._filled:
            self._filled.move_to_end(window.first_step)
            return self._filled[window.first_step]
        result = self._filled[window.first_step] = self._packed(window)
        while len(self._filled) > WINDOWS_KEPT:
            self._filled.popitem(last=False)
        return result

    def _packed(self, window: _Window) -> tuple[_Place, list[list[Slot]]]:
        segment = self._plan.segments[window.segment]
        packs_max = window.steps * self._plan.packs_in(segment)
        capacity = self._plan.tokens_in(segment)
        want = packs_max * SLOTS_PER_PACK_MIN
        while True:
            slots, lengths, stretches = self._slots(window, want)
            # More slots than needed change nothing: packs take the first ones that fill them.
            if int(lengths.sum()) > packs_max * capacity:
                break
            if len(slots) < want and not self._plan.epochs_max:
                raise NotSealedError(self._waits_for(window))
            if len(slots) < want:
                break
            want *= 2
        if not slots and not self._is_over(window.first_step):
            raise SourceInvalidError(used_up(self._plan, window.first_step), field="data.sources[].epochsMax")
        used, packed = longest_prefix(lengths.tolist(), capacity=capacity, packs_max=packs_max)
        packs = [[slots[at] for at in samples] for samples in packed]
        packs += [[] for _ in range(packs_max - len(packs))]
        order = permute(np.arange(packs_max), size=packs_max, key=f"{self._plan.seed}:packs:{window.first_step}")
        places = [stretch.place(used) for stretch in reversed(stretches) if stretch.first <= used]
        return next(iter(places), (window.slot, window.base)), [packs[at] for at in order]

    def _slots(self, window: _Window, count: int) -> tuple[Sequence[Slot], npt.NDArray[np.int64], Sequence[_Stretch]]:
        """Return the samples of some slots, and their lengths; fewer where nothing more is sealed, or left."""
        slots: list[Slot] = []
        lengths, stretches = [np.zeros(0, np.int64)], []
        slot, base = window.slot, window.base
        while len(slots) < count and (mixture := self._mixture(window.segment, base)) is not None:
            stretches.append(_Stretch(len(slots), slot, base))
            want = self._until_last_turn(window.segment, mixture, slot, base, count - len(slots))
            found, length_N = self._samples(window.segment, mixture, slot, base, want)
            slots, lengths = [*slots, *found], [*lengths, length_N]
            if len(found) < want:
                break
            slot, base = 0, self._turns(window.segment, slot + want, base)
        return slots, np.concatenate(lengths), stretches

    def _until_last_turn(self, segment: int, mixture: Mixture, slot: int, base: Sequence[int], count: int) -> int:
        """Count the slots up to the one with which a source has had all its turns; at most so many."""
        taken = mixture.taken(slot)
        for source in range(len(base)) if self._plan.epochs_max else ():
            left, share = self._left(segment, source, base), mixture.share(source)
            # Any slots in a row hold each source's share within two samples.
            if left is not None and share and left - taken[source] <= count * share + 2:
                count = min(count, mixture.slot_of(source, left - 1) + 1 - slot)
        return count

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
            fitting, size = self._fitting[segment][source], self._size(segment, source)
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

    def _waits_for(self, window: _Window) -> str:
        growing = [
            f"{name} has {len(blocks.ends)} of {blocks.total}"
            for source, name in enumerate(self._plan.names)
            if (blocks := self._plan.blocks_of(source)) is not None and not blocks.complete
        ]
        last = window.first_step + window.steps - 1
        return (
            f"steps {window.first_step} to {last} need a block of samples that is not sealed yet: "
            f"source {', '.join(growing)}"
        )

    def _check(self) -> None:
        for number in unfilled_segments(self._plan)[:1]:
            segment = self._plan.segments[number]
            for source, (name, weight) in enumerate(zip(self._plan.names, segment.weights, strict=True)):
                if weight and not self._plan.is_growing(source) and not self._size(number, source):
                    samples, tokens = self._plan.lengths[source].size, self._plan.tokens_in(segment)
                    short = f" of at most {tokens} tokens, of {samples}" if samples else ""
                    raise SourceInvalidError(
                        f"source {name} has weight {weight} from step {segment.first_step} on, and no sample{short}"
                    )


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
