"""Outlook of a mixture over a run: shares, epochs, and when limits of epochs leave nothing to train on.

Computed from mean lengths, as if packs had no gaps and samples flowed: a few operations for each source and change,
where the order itself would pack every window. Steps are exact to some percent.

Visits of samples are counted by a walk through the order where the run is short enough. Otherwise from epochs: after
any step, the samples of a source have been visited n or n + 1 times (``order``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_planner.mixture import Segment

MARGIN_PERCENT = 1
"""Steps beyond a segment's end for which the data must last, as a share of the steps before the segment, and one more:
within them the sources are where mean lengths say."""
HALF_A_TURN = 0.5
"""Of a source that has less left, the last epoch is over: turns are whole, and the rest is rounding."""
TURNS_WALKED_MAX = 400_000
"""Turns of samples that are counted one by one: about 2 s."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """How often the samples of a source were visited, of those that fit."""

    least: int
    most: int
    unseen: int
    """Samples that were never visited."""
    exact: bool = True
    """False: from mean lengths, to some percent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceOutlook:
    """What one source gives to the steps of a segment."""

    name: str
    samples_ratio: float
    """Share of the samples."""
    tokens_ratio: float
    """Share of the tokens."""
    epochs: float
    """Epochs that it has had by the end of the segment, all segments counted, with what was passed over."""
    ends_step: int | None = None
    """Step at about which its last epoch ends; None: not in this segment."""
    visits: Visits | None = None
    """Of its samples by the end of the segment, all segments counted; None: not asked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOutlook:
    """Steps with the same weights and packs."""

    first_step: int
    last_step: int
    sources: tuple[SourceOutlook, ...]


@dataclasses.dataclass(slots=True)
class _Run:
    """How far the sources are."""

    turns: list[float]
    sizes: list[int]
    """Samples of each source that fit the packs of the segment before."""


@dataclasses.dataclass(slots=True)
class _Flow:
    """What the sources give to one segment."""

    means: list[float]
    """Mean length of the samples of each source that fit."""
    left: list[float]
    """Turns before the end of the last epoch."""
    given: list[float]
    """Turns up to the last step."""
    ends: dict[int, int]
    """Step at which the last epoch of a source ends."""


def outlook(plan: OrderPlan, steps: int) -> list[SegmentOutlook]:
    """Return what each source gives to each segment of a run, by rising steps; ends where the data are used up.

    Args:
        plan: The order; its weights are those of ``weighing.weighed``.
        steps: Last step of the run.
    """
    return _walk(plan, steps)[0]


def used_up_step(plan: OrderPlan, steps: int) -> int | None:
    """Return the step at about which no source with a weight has a turn left; None if the data last.

    Args:
        plan: As in ``outlook``.
        steps: Last step of the run.
    """
    return _walk(plan, steps)[1] if plan.epochs_max else None


def _walk(plan: OrderPlan, steps: int) -> tuple[list[SegmentOutlook], int | None]:
    run = _Run([0.0] * len(plan.names), [0] * len(plan.names))
    found: list[SegmentOutlook] = []
    for segment, following in zip(plan.segments, [*plan.segments[1:], None], strict=True):
        if segment.first_step > steps:
            break
        last = steps if following is None else min(steps, following.first_step - 1)
        passed = 0 if following is None or following.first_step > steps else following.skip_steps
        row, used_up = _segment(plan, segment, run, last, passed)
        found.append(row)
        if used_up is not None:
            return found, used_up
    return found, None


def _segment(plan: OrderPlan, segment: Segment, run: _Run, last: int, passed: int) -> tuple[SegmentOutlook, int | None]:
    pack_tokens = plan.tokens_in(segment)
    fitting = plan.fitting_lengths(plan.sample_tokens_in(segment))
    _carry(run, [int(lengths.size) for lengths in fitting])
    flow = _Flow(
        means=[float(lengths.mean()) + segment.answer_room if lengths.size else 0.0 for lengths in fitting],
        left=[_left(plan, at, int(lengths.size), run.turns[at]) for at, lengths in enumerate(fitting)],
        given=[0.0] * len(fitting),
        ends={},
    )
    step, end = float(segment.first_step), float(last + 1 + passed)
    margin = 1 + segment.first_step * MARGIN_PERCENT // 100
    used_up = None
    while step < end + margin:
        rates = _rates(segment.weights, flow, plan.packs_in(segment) * pack_tokens)
        if not any(rates):
            used_up = min(math.floor(step), last)
            break
        until = min([end if step < end else end + margin, *_ends(rates, flow.left, step)])
        for at, rate in enumerate(rates):
            turns = rate * (until - step)
            run.turns[at] += turns if step < end else 0.0
            flow.given[at] += turns if step <= last else 0.0
            flow.left[at] -= turns
            if rate and flow.left[at] <= HALF_A_TURN:
                flow.left[at], flow.ends[at] = 0.0, math.floor(until)
        step = until
    return _row(plan, segment, last, run, flow), used_up


def _carry(run: _Run, sizes: Sequence[int]) -> None:
    """Begin the next epoch of a source where other samples fit than before, as the order does."""
    for at, (before, size) in enumerate(zip(run.sizes, sizes, strict=True)):
        if before and size and before != size:
            run.turns[at] = math.ceil(run.turns[at] / before) * size
        run.sizes[at] = size or before


def _left(plan: OrderPlan, source: int, size: int, turns: float) -> float:
    epochs = plan.epochs_max[source] if plan.epochs_max else None
    return math.inf if epochs is None else max(0.0, epochs * size - turns)


def _rates(weights: Sequence[int], flow: _Flow, tokens: int) -> list[float]:
    """Return the turns of each source in a step."""
    shares = [float(weight) if turns > 0 else 0.0 for weight, turns in zip(weights, flow.left, strict=True)]
    whole = sum(share * mean for share, mean in zip(shares, flow.means, strict=True))
    return [share * tokens / whole for share in shares] if whole else [0.0] * len(shares)


def _ends(rates: Sequence[float], left: Sequence[float], step: float) -> list[float]:
    return [step + turns / rate for rate, turns in zip(rates, left, strict=True) if rate and turns < math.inf]


def _row(plan: OrderPlan, segment: Segment, last: int, run: _Run, flow: _Flow) -> SegmentOutlook:
    samples = sum(flow.given) or 1.0
    tokens = sum(turns * mean for turns, mean in zip(flow.given, flow.means, strict=True)) or 1.0
    sources = tuple(
        SourceOutlook(
            name=name,
            samples_ratio=flow.given[at] / samples,
            tokens_ratio=flow.given[at] * flow.means[at] / tokens,
            epochs=run.turns[at] / size if (size := run.sizes[at]) else 0.0,
            ends_step=ends if (ends := flow.ends.get(at, last + 1)) <= last else None,
        )
        for at, name in enumerate(plan.names)
    )
    return SegmentOutlook(first_step=segment.first_step, last_step=last, sources=sources)


def outlook_with_visits(plan: OrderPlan, steps: int) -> list[SegmentOutlook]:
    """Return what each source gives to each segment of a run, with the visits up to its end.

    Args:
        plan: As in ``outlook``.
        steps: Last step of the run.
    """
    rows = outlook(plan, steps)
    counts = [np.zeros(lengths.size, np.int32) for lengths in plan.lengths]
    usable = [np.zeros(lengths.size, np.bool_) for lengths in plan.lengths]
    order = Order(plan) if rows and _turns(plan, rows[-1]) <= TURNS_WALKED_MAX else None
    found: list[SegmentOutlook] = []
    for row, segment in zip(rows, plan.segments, strict=False):
        for source, lengths in enumerate(plan.lengths):
            if segment.weights[source]:
                usable[source] |= lengths <= plan.sample_tokens_in(segment)
        if order is not None:
            _count(order, row, counts)
            visits = [_counted(of[fits]) for of, fits in zip(counts, usable, strict=True)]
        else:
            visits = [_about(of.epochs, int(fits.sum())) for of, fits in zip(row.sources, usable, strict=True)]
        both = zip(row.sources, visits, strict=True)
        found.append(dataclasses.replace(row, sources=tuple(dataclasses.replace(of, visits=to) for of, to in both)))
    return found


def _turns(plan: OrderPlan, row: SegmentOutlook) -> float:
    return sum(of.epochs * lengths.size for of, lengths in zip(row.sources, plan.lengths, strict=True))


def _count(order: Order, row: SegmentOutlook, counts: list[npt.NDArray[np.int32]]) -> None:
    for step in range(row.first_step, row.last_step + 1):
        for slots in order.packs(step):
            for slot in slots:
                counts[slot.source][slot.sample] += 1


def _counted(visits_S: npt.NDArray[np.int32]) -> Visits:
    if not visits_S.size:
        return Visits(least=0, most=0, unseen=0)
    return Visits(least=int(visits_S.min()), most=int(visits_S.max()), unseen=int((visits_S == 0).sum()))


def _about(epochs: float, samples: int) -> Visits:
    unseen = max(0, math.ceil(samples * (1 - epochs)))
    return Visits(least=math.floor(epochs), most=math.ceil(epochs), unseen=unseen, exact=False)
