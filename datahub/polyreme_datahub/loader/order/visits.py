"""How often a run visits the samples of each source: the least, the most, and how many it never sees.

Counted by a walk through the order where the run is short enough. Otherwise from epochs: after any step, the samples of
a source have been visited n or n + 1 times (``loader.order.order``).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.outlook import SegmentOutlook, Visits, outlook
from polyreme_datahub.loader.order.plan import OrderPlan

TURNS_WALKED_MAX = 400_000
"""Turns of samples that are counted one by one: about 2 s."""
_Counts = list[npt.NDArray[np.int32]]


def outlook_with_visits(plan: OrderPlan, steps: int) -> list[SegmentOutlook]:
    """Return what each source gives to each segment of a run, with the visits up to its end.

    Args:
        plan: As in ``outlook.outlook``.
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
                usable[source] |= lengths <= plan.tokens_in(segment)
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


def _count(order: Order, row: SegmentOutlook, counts: _Counts) -> None:
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
