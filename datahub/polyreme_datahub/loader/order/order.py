"""The order of a run: the samples in each pack of each step, as a pure function of (plan, step).

Slots 0, 1, 2, ... of a segment (steps with the same weights and packs) name a source each; a source's samples come in
epochs, each a keyed permutation. Samples that are longer than a segment's packs have no turn in it: an epoch is one of
those that fit. Where other samples fit than in the segment before, a source begins its next epoch. A source with a
limit of epochs has no turn after its last one: the slots after it are numbered from 0 again, and go to the others by
their weights.

A window is a whole number of steps: as many slots as its packs hold are packed together, and the packs are shuffled. A
window of several steps holds no two epochs of a source: it ends with the last whole step before one begins its next
epoch, and the step in which that happens is a window by itself. So after any step, all samples of a source
that fit have been visited n or n + 1 times (ADR 55). Jobs that began with an earlier release keep windows of several
epochs.

A window begins where the one before ended, so its first slot depends on the lengths before it: first slots are found
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyreme_api.errors import NotSealedError
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.index.format import EVEN
from polyreme_datahub.loader.order.plan import OrderPlan, unfilled_segments, used_up
from polyreme_datahub.loader.order.slots import Place, Slot, Slots, permute
from polyreme_planner.mixture import WINDOW_PACKS, window_steps

WINDOWS_KEPT = 4
"""Filled windows in memory."""
WINDOWS_KNOWN_MAX = 4096
"""Beginnings of windows in memory; beyond, every other one is forgotten and found again from the one before."""
SLOTS_PER_PACK_MIN = 16


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
class _Filled:
    place: Place
    """Where the next window begins."""
    steps: int
    packs: list[list[Slot]]


class Order:
    """Packs of slots, by step."""

    def __init__(self, plan: OrderPlan, *, window_packs: int = WINDOW_PACKS) -> None:
        self._window_packs = window_packs
        self._plan, self._slots = plan, Slots(plan)
        self._check()
        self._known = [self._window(0, 1, 0, (0,) * len(plan.names))]
        self._filled: OrderedDict[int, _Filled] = OrderedDict()

    def extend(self, plan: OrderPlan) -> None:
        """Take over a plan in which more blocks are sealed; everything known stays as it is."""
        self._plan = plan
        self._slots.extend(plan)
        self._check()

    def amend(self, plan: OrderPlan, *, from_step: int) -> None:
        """Take over a plan with other weights from a step on, with which a window begins; earlier steps stay."""
        self._plan = plan
        self._slots.take(plan)
        self._check()
        self._known = [window for window in self._known if window.first_step < from_step]
        for step in [step for step in self._filled if step >= from_step]:
            del self._filled[step]

    def blocks_before(self, step: int) -> list[int]:
        """Count the blocks of each source that the window of a step follows, in the first epoch."""
        window = self._find(step)
        found: list[int] = []
        for source, turns in enumerate(self._slots.turns(window.segment, window.slot, window.base)):
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
        packs, count = self._fill(window).packs, self._plan.packs_in(self._plan.segments[window.segment])
        first = (step - window.first_step) * count
        return packs[first : first + count]

    def windows(self) -> Iterator[tuple[range, tuple[int, ...]]]:
        """Yield the steps of each window, and the turns of each source up to its end, with what is passed over."""
        window = self._known[0]
        while True:
            following = self._following(window)
            turns = self._slots.turns(following.segment, following.slot, following.base)
            yield range(window.first_step, following.first_step), turns
            window = following

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
        # Slots count from 0 in a segment's first window, and after a source's last turn.
        if passed < 0 or (passed == 0 and slot) or (passed and not slot and not self._plan.epochs_max):
            return False
        at_border = self._plan.version >= EVEN or passed % self._window_steps(segment) == 0
        if not at_border and not self._begins(segment + 1, step):
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
        while window.first_step + self._steps(window, step) <= step:
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
        filled = self._fill(window)
        return self._window_at(window.segment, window.first_step + filled.steps, *filled.place)

    def _window_at(self, segment: int, step: int, slot: int, base: tuple[int, ...]) -> _Window:
        """Return the window of a step, given where the one before it ended in its segment."""
        following = segment + 1
        if self._begins(following, step):
            turns = self._slots.turns(segment, *self._passed_over(segment, step, slot, base))
            window = self._window(following, step, 0, self._slots.carry(segment, following, turns))
            return dataclasses.replace(window, after=(segment, slot, base))
        return self._window(segment, step, slot, base)

    def _begins(self, segment: int, step: int) -> bool:
        return segment < len(self._plan.segments) and self._plan.segments[segment].first_step == step

    def _passed_over(self, segment: int, step: int, slot: int, base: tuple[int, ...]) -> Place:
        """Return the place after the samples that a segment's end passes over: of the steps that would follow."""
        left = self._plan.segments[segment + 1].skip_steps
        while left:
            window = _Window(segment, step, min(left, self._window_steps(segment)), slot, base)
            filled = self._packed(window)
            slot, base = filled.place
            step, left = step + filled.steps, left - filled.steps
        return slot, base

    def _window_steps(self, segment: int) -> int:
        return window_steps(self._plan.packs_in(self._plan.segments[segment]), self._window_packs)

    def _window(self, segment: int, first_step: int, slot: int, base: tuple[int, ...]) -> _Window:
        segments, steps = self._plan.segments, self._window_steps(segment)
        if self._plan.version >= EVEN:
            steps -= (first_step - segments[segment].first_step) % steps
        if segment + 1 < len(segments):
            steps = min(steps, segments[segment + 1].first_step - first_step)
        if self._plan.last_step is not None and not self._is_over(first_step):
            steps = min(steps, self._plan.last_step - first_step + 1)
        return _Window(segment, first_step, steps, slot, base)

    def _is_over(self, step: int) -> bool:
        return self._plan.last_step is not None and step > self._plan.last_step

    def _fill(self, window: _Window) -> _Filled:
        if window.first_step in self._filled:
            self._filled.move_to_end(window.first_step)
            return self._filled[window.first_step]
        result = self._filled[window.first_step] = self._packed(window)
        while len(self._filled) > WINDOWS_KEPT:
            self._filled.popitem(last=False)
        return result

    def _packed(self, window: _Window) -> _Filled:
        segment, place = self._plan.segments[window.segment], (window.slot, window.base)
        of_step, capacity = self._plan.packs_in(segment), self._plan.tokens_in(segment)
        want = window.steps * of_step * SLOTS_PER_PACK_MIN
        while True:
            count = self._slots_of_window(window, want)
            slots, lengths, stretches = self._slots.read(window.segment, place, count)
            tokens, steps = int(lengths.sum()), window.steps
            # More slots than needed change nothing: packs take the first ones that fill them.
            if tokens > steps * of_step * capacity:
                break
            if len(slots) < count and not self._plan.epochs_max:
                raise NotSealedError(self._waits_for(window))
            if len(slots) < count:
                break
            if count < want:
                steps = tokens // (of_step * capacity)
                if not steps:
                    return self._packed(dataclasses.replace(window, steps=1))
                break
            want *= 2
        if not slots and not self._is_over(window.first_step):
            raise SourceInvalidError(used_up(self._plan, window.first_step), field="data.sources[].epochsMax")
        packs_max = steps * of_step
        used, packed = longest_prefix(lengths.tolist(), capacity=capacity, packs_max=packs_max)
        packs = [[slots[at] for at in samples] for samples in packed]
        packs += [[] for _ in range(packs_max - len(packs))]
        order = permute(np.arange(packs_max), size=packs_max, key=f"{self._plan.seed}:packs:{window.first_step}")
        places = [stretch.place(used) for stretch in reversed(stretches) if stretch.first <= used]
        return _Filled(next(iter(places), place), steps, [packs[at] for at in order])

    def _slots_of_window(self, window: _Window, count: int) -> int:
        """Count the slots that a window may take, at most so many. One of a single step may take any."""
        if self._plan.version < EVEN or window.steps == 1:
            return count
        return self._slots.before_next_epoch(window.segment, (window.slot, window.base), count)

    def _steps(self, window: _Window, step: int) -> int:
        """Return the steps of a window; at least one up to a step that is its first, for which nothing is packed."""
        if self._plan.version < EVEN or window.steps == 1 or step == window.first_step:
            return window.steps
        return self._fill(window).steps

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
                if weight and not self._plan.is_growing(source) and not self._slots.size(number, source):
                    samples, tokens = self._plan.lengths[source].size, self._plan.sample_tokens_in(segment)
                    short = f" of at most {tokens} tokens, of {samples}" if samples else ""
                    raise SourceInvalidError(
                        f"source {name} has weight {weight} from step {segment.first_step} on, and no sample{short}"
                    )


def pack(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Pack every sample; return the samples of each pack, by their place in ``lengths``, ascending.

    Best fit: into the fullest pack that still holds it. Longer samples first; equal ones in order.

    Raises:
        ValueError: If a sample is longer than a pack.
    """
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []
    """(free tokens, pack), ascending."""
    for sample in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        length = lengths[sample]
        if length > capacity:
            raise ValueError(f"sample of {length} tokens in a pack of {capacity}")
        place = bisect.bisect_left(open_packs, (length, -1))
        if place == len(open_packs):
            free, number = capacity, len(packs)
            packs.append([])
        else:
            free, number = open_packs.pop(place)
        packs[number].append(sample)
        if free > length:
            bisect.insort(open_packs, (free - length, number))
    return [sorted(samples) for samples in packs]


def longest_prefix(lengths: Sequence[int], *, capacity: int, packs_max: int) -> tuple[int, list[list[int]]]:
    """Find how many samples, in order, fill ``packs_max`` packs, and pack them.

    Starts from what would fit without a gap, and gives samples back until best-fit decreasing needs no more packs
    than there are.
    """
    total, count = 0, 0
    for length in lengths:
        if total + length > capacity * packs_max:
            break
        total += length
        count += 1
    while True:
        packs = pack(lengths[:count], capacity=capacity)
        over = packs[packs_max:]
        if not over:
            return count, packs
        excess = sum(lengths[sample] for samples in over for sample in samples)
        while excess > 0 and count > 0:
            count -= 1
            excess -= lengths[count]
