"""The search of mode Auto: small enough for the operator's loop, and the same on every machine.

Layouts are bounded from below first, each once; the cheapest are gone through until a handful of candidates fits the
memory, and these are played a few times. Where a job leaves to the planner what layers make anew, they are gone through
once for each choice, the least first, and further ones only where something did not fit: of two plans that are alike
the one that makes less anew is the faster. All budgets are counts. What was found is kept, since the same job is
planned again and again: by the operator, the launcher and each resize.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from polyreme_api.plan.costs import Recompute, Setting
from polyreme_api.plan.layout import Layout
from polyreme_api.plan.memory import least_states
from polyreme_api.plan.schedules import stages_per_rank
from polyreme_api.plan.search import (
    Candidate,
    Estimate,
    Found,
    Pricer,
    layouts,
    played_microbatches,
    trained_today,
    ways,
)

LAYOUTS_MAX = 4_000
"""Layouts of a world that are looked at."""
WEIGHED_MAX = 300
"""Candidates whose memory is worked out, cheapest layouts first; as many again, leanest first, where none fits."""
FITTING_MAX = 40
"""Candidates that fit the memory, among which the fastest are played."""
OF_LAYOUT = 4
"""Candidates of one layout among them."""
FINALISTS = 8
"""Candidates that are played."""
PLAYS = 12
SLOTS_MAX = 12_000
"""Pieces of work that the plays of one finalist may come to: long pipelines are played less often."""
KEPT = 4_096
"""Searches whose results are kept."""
SLACK = 0.05
"""Share by which a candidate that is priced higher than the best one so far may still come out faster when played; up
to 0.02 was seen."""
HOLDING_ALL = (Recompute.NONE,)
"""What layers may make anew, where they make nothing anew."""


@functools.lru_cache(maxsize=KEPT)
def quick_search(
    setting: Setting, *, world: int, packs_per_step: int, recomputes: tuple[Recompute, ...] = HOLDING_ALL
) -> Found:
    """Search what this version trains, within the budgets above.

    Args:
        setting: Model, mix, hardware and numerics; nothing measured.
        world: Ranks.
        packs_per_step: Of all ranks together.
        recomputes: What layers may make anew, the least first. Each is searched as if it were named alone, and the
            fastest of all is the choice, of equals the one that makes least anew.
    """
    pricer, usable = Pricer(setting), setting.hardware.usable_bytes
    roomy: list[tuple[float, int, Layout]] = []
    lean: list[tuple[float, int, Layout]] = []
    state_of = least_states(setting)
    found = itertools.islice(layouts(setting, world=world, packs_per_step=packs_per_step), LAYOUTS_MAX)
    for number, layout in enumerate(found):
        state = state_of(layout)
        lean.append((state, number, layout))
        if state <= usable:
            roomy.append((pricer.bound_s(layout, packs_per_step // layout.dp), number, layout))
    roomy.sort()
    lean.sort()
    by_time, bounds_s = [layout for _, _, layout in roomy], [bound_s for bound_s, _, _ in roomy]
    best: Estimate | None = None
    unfit: list[Estimate] = []
    for recompute in recomputes:
        sieve = _Sieve(pricer, recompute, packs_per_step)
        fitting = sieve.fitting(by_time, bounds_s, than_s=math.inf if best is None else best.step_s * (1 + SLACK))
        if not fitting and best is None:
            fitting = sieve.fitting([layout for _, _, layout in lean])
        finalists = sorted(fitting, key=_order)[:FINALISTS]
        played = [pricer.played(of.candidate, _plays(of.candidate)) for of in finalists]
        best = min(filter(None, (best, *sorted(played, key=_order))), key=lambda of: _rounded(of.step_s), default=None)
        if sieve.leanest is None:
            break
        unfit.append(sieve.leanest)
    if best is None:
        leanest = min(unfit, key=lambda of: of.memory.total_bytes, default=None)
        return Found(best=None, runners_up=(), leanest=leanest, examined=len(lean), unfit=len(lean))
    return Found(best=best, runners_up=(), leanest=None, examined=len(lean), unfit=len(lean) - len(roomy))


def nearest(
    setting: Setting, asked: Layout, *, packs_per_step: int, recomputes: tuple[Recompute, ...] = HOLDING_ALL
) -> Estimate | None:
    """Find the layout most like the one asked for that fits the memory, with microbatches and schedule that do.

    Args:
        setting: Model, mix, hardware and numerics.
        asked: Says how many ranks there are.
        packs_per_step: Of all ranks together.
        recomputes: What layers may make anew, the least first.
    """
    found = itertools.islice(layouts(setting, world=asked.world, packs_per_step=packs_per_step), LAYOUTS_MAX)
    state_of, usable = least_states(setting), setting.hardware.usable_bytes
    near = sorted((layout for layout in found if state_of(layout) <= usable), key=lambda of: distance(of, asked))
    pricer = Pricer(setting)
    sieves = [_Sieve(pricer, recompute, packs_per_step) for recompute in recomputes]
    fitting = [estimate for sieve in sieves for estimate in sieve.fitting(near, count=1)]
    return min(fitting, key=lambda of: distance(of.candidate.layout, asked), default=None)


def distance(one: Layout, other: Layout) -> tuple[int, ...]:
    """How unlike two layouts are: by the axis that cuts layers first, those that cut tokens, then by ep."""
    tokens = abs(one.cp - other.cp) + abs(one.tp - other.tp)
    return abs(one.pp - other.pp), tokens, abs(one.ep - other.ep), one.ep, one.cp


class _Sieve:
    """Lets candidates through that fit the memory, and remembers the leanest of the others."""

    def __init__(self, pricer: Pricer, recompute: Recompute, packs_per_step: int) -> None:
        self._pricer = pricer
        self._usable_bytes = pricer.setting.hardware.usable_bytes
        self._recompute = recompute
        self._packs_per_step = packs_per_step
        self.leanest: Estimate | None = None

    def fitting(
        self,
        order: Sequence[Layout],
        bounds: Sequence[float] | None = None,
        *,
        than_s: float = math.inf,
        count: int = FITTING_MAX,
    ) -> list[Estimate]:
        """Return the first that fit, in the order of their layouts.

        Args:
            order: Layouts.
            bounds: Rising times that each can't be faster than; layouts that have no chance are left out.
            than_s: Price from which on candidates have no chance either.
            count: How many to return.
        """
        fitting: list[Estimate] = []
        weighed, fastest_s = 0, than_s
        for number, layout in enumerate(order):
            if bounds is not None and bounds[number] > fastest_s:
                break
            of_layout = 0
            for candidate in self._ways(layout):
                if weighed == WEIGHED_MAX or len(fitting) == count:
                    return fitting
                if of_layout == OF_LAYOUT or self._pricer.quick_s(candidate) > than_s:
                    break
                weighed += 1
                estimate = self._pricer.weighed(candidate)
                if estimate.memory.total_bytes <= self._usable_bytes:
                    fitting.append(estimate)
                    if candidate.schedule is None:  # a pipeline's price leaves out what it waits
                        fastest_s = min(fastest_s, estimate.step_s)
                    of_layout += 1
                elif self.leanest is None or estimate.memory.total_bytes < self.leanest.memory.total_bytes:
                    self.leanest = estimate
        return fitting

    def _ways(self, layout: Layout) -> list[Candidate]:
        """List the candidates of a layout that are trained, cheapest first."""
        setting = self._pricer.setting
        known = [
            of
            for of in ways(setting, layout, packs_per_step=self._packs_per_step, recomputes=(self._recompute,))
            if trained_today(of)
        ]
        priced = [(_rounded(self._pricer.quick_s(of)), of.microbatches, number) for number, of in enumerate(known)]
        return [known[number] for _, _, number in sorted(priced)]


def _plays(of: Candidate) -> int:
    if of.schedule is None:
        return 1
    slots = 3 * of.layout.pp * stages_per_rank(of.schedule) * played_microbatches(of)
    return max(1, min(PLAYS, SLOTS_MAX // slots))


def _order(estimate: Estimate) -> tuple[float, int, tuple[int, ...], str]:
    """Fastest first; of equals the simplest: fewest microbatches, fewest stages, uncut packs, whole experts."""
    of = estimate.candidate
    simple = (of.layout.pp, of.layout.cp * of.layout.tp, of.layout.ep)
    return _rounded(estimate.step_s), of.microbatches, simple, str(of)


def _rounded(seconds: float) -> float:
    """Drop digits that say nothing."""
    return float(f"{seconds:.5g}")
