"""The automatic search of a plan: within counted budgets, and the same on every machine.

Layouts are bounded from below first, each once, and visited from the cheapest bound on. The cheapest candidates that
fit the memory are kept, until no remaining layout can be cheaper than they are; these are simulated on their schedules
with layers split by cost. If a job leaves recomputation to the planner, the choices are searched one after another, the
least first, and further ones only where something did not fit: of two similar plans the one that recomputes less is
faster. All budgets are counts, never seconds.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence

from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.layout import Layout, packs_of_rank
from polyreme_planner.memory import least_states
from polyreme_planner.schedules import Schedule, stages_per_rank
from polyreme_planner.search import (
    Candidate,
    Estimate,
    Found,
    Pricer,
    is_supported,
    layout_candidates,
    layouts,
    simulated_microbatches,
    why_slower,
)

LAYOUTS_MAX = 4_000
"""Layouts of a world that are examined."""
ESTIMATED_MAX = 1_500
"""Candidates whose memory is computed, cheapest layouts first; as many again, leanest first, if none fits."""
OF_LAYOUT = 4
"""Candidates of one layout among the finalists."""
FINALISTS = 16
"""Candidates that are simulated."""
SIMULATIONS = 12
SLOTS_MAX = 12_000
"""Pieces of work that the simulations of one finalist may have: long pipelines are simulated less often."""
WINNERS, WINNER_SIMULATIONS, WINNER_SLOTS_MAX = 2, 60, 60_000
"""Finalists that are simulated more often, to split their layers better."""
KEPT = 4_096
"""Searches whose results are kept."""
SLACK = 0.05
"""Share by which a candidate that is priced higher than the best one so far may still be faster when simulated; up to
0.02 was seen."""
HOLDING_ALL = (Recompute.NONE,)
"""Choices of recomputation for jobs that recompute nothing."""


@functools.lru_cache(maxsize=KEPT)
def quick_search(
    setting: Setting,
    *,
    world: int,
    packs_per_step: int,
    recomputes: tuple[Recompute, ...] = HOLDING_ALL,
    runners_up: int = 0,
) -> Found:
    """Search what this version trains, within the budgets above.

    Args:
        setting: Model, mix, hardware and numerics.
        world: Ranks.
        packs_per_step: Of all ranks together.
        recomputes: What layers may recompute, the least first. Each is searched as if it were named alone, and the
            fastest of all is the choice, of equals the one that recomputes least.
        runners_up: Other layouts that are returned, with the reason why each lost.
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
            roomy.append((pricer.bound_s(layout, packs_of_rank(packs_per_step, layout.dp)), number, layout))
    roomy.sort()
    lean.sort()
    by_time, bounds_s = [layout for _, _, layout in roomy], [bound_s for bound_s, _, _ in roomy]
    simulated: list[Estimate] = []
    too_large: list[Estimate] = []
    for recompute in recomputes:
        memory_filter = _MemoryFilter(pricer, recompute, packs_per_step)
        than_s = min((of.step_s for of in simulated), default=math.inf) * (1 + SLACK)
        fitting = memory_filter.fitting(by_time, bounds_s, than_s=than_s)
        if not fitting and not simulated:
            fitting = memory_filter.fitting([layout for _, _, layout in lean])
        simulated += _simulated(pricer, fitting)
        if memory_filter.leanest is None:
            break
        too_large.append(memory_filter.leanest)
    if not simulated:
        leanest = min(too_large, key=lambda of: of.memory.total_bytes, default=None)
        return Found(best=None, runners_up=(), leanest=leanest, examined=len(lean), too_large=len(lean))
    # Stable: of equals the one that recomputes least.
    best, *others = sorted(simulated, key=lambda of: _rounded(of.step_s))
    return Found(
        best=best,
        runners_up=tuple((of, why_slower(of, best)) for of in _one_of_each(others, best)[:runners_up]),
        leanest=None,
        examined=len(lean),
        too_large=len(lean) - len(roomy),
    )


def _simulated(pricer: Pricer, fitting: Sequence[Estimate]) -> list[Estimate]:
    """Simulate the finalists on their schedules, the best of them more often; fastest first."""
    finalists = (
        pricer.simulated(of.candidate, _simulations(of.candidate, SIMULATIONS, SLOTS_MAX))
        for of in sorted(fitting, key=_order)[:FINALISTS]
    )
    ordered = sorted(finalists, key=_order)
    winners = (
        pricer.simulated(of.candidate, _simulations(of.candidate, WINNER_SIMULATIONS, WINNER_SLOTS_MAX))
        for of in ordered[:WINNERS]
    )
    return sorted([*winners, *ordered[WINNERS:]], key=_order)


def _one_of_each(ordered: Sequence[Estimate], best: Estimate) -> list[Estimate]:
    """Keep the best of each layout and schedule: entries that differ only in microbatches are no alternatives."""
    first: dict[tuple[Layout, Schedule | None], Estimate] = {}
    for of in (best, *ordered):
        first.setdefault((of.candidate.layout, of.candidate.schedule), of)
    return list(first.values())[1:]


def nearest(
    setting: Setting, asked: Layout, *, packs_per_step: int, recomputes: tuple[Recompute, ...] = HOLDING_ALL
) -> Estimate | None:
    """Find the layout most like the requested one that fits the memory, with microbatches and schedule that do.

    Args:
        setting: Model, mix, hardware and numerics.
        asked: The requested layout, which gives the number of ranks.
        packs_per_step: Of all ranks together.
        recomputes: What layers may recompute, the least first.
    """
    found = itertools.islice(layouts(setting, world=asked.world, packs_per_step=packs_per_step), LAYOUTS_MAX)
    state_of, usable = least_states(setting), setting.hardware.usable_bytes
    near = sorted((layout for layout in found if state_of(layout) <= usable), key=lambda of: distance(of, asked))
    pricer = Pricer(setting)
    memory_filters = [_MemoryFilter(pricer, recompute, packs_per_step) for recompute in recomputes]
    fitting = [estimate for memory_filter in memory_filters for estimate in memory_filter.fitting(near, count=1)]
    return min(fitting, key=lambda of: distance(of.candidate.layout, asked), default=None)


def distance(one: Layout, other: Layout) -> tuple[int, ...]:
    """Distance of two layouts: by the axes that cut layers first, then those that cut tokens, then ep."""
    tokens = abs(one.cp - other.cp) + abs(one.tp - other.tp)
    return abs(one.pp - other.pp), tokens, abs(one.ep - other.ep), one.ep, one.cp


class _MemoryFilter:
    """Passes candidates that fit the memory, and remembers the leanest of the others."""

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
        count: int = FINALISTS,
    ) -> list[Estimate]:
        """Return the cheapest that fit; without bounds, the first.

        Args:
            order: Layouts.
            bounds: Rising times that each can't be faster than; once enough fit, layouts that can't be cheaper than
                they are end the search.
            than_s: Price from which on candidates have no chance either.
            count: How many to return.
        """
        kept: list[tuple[float, int, Estimate]] = []
        estimated, limit_s = 0, than_s
        for number, layout in enumerate(order):
            if bounds is not None and bounds[number] > limit_s:
                break
            of_layout = 0
            for candidate in self._layout_candidates(layout):
                if of_layout == OF_LAYOUT or self._pricer.quick_s(candidate) > limit_s:
                    break
                if estimated == ESTIMATED_MAX:
                    return [of for _, _, of in kept]
                estimated += 1
                estimate = self._pricer.estimated(candidate)
                if estimate.memory.total_bytes > self._usable_bytes:
                    if self.leanest is None or estimate.memory.total_bytes < self.leanest.memory.total_bytes:
                        self.leanest = estimate
                    continue
                of_layout += 1
                bisect.insort(kept, (_rounded(estimate.step_s), estimated, estimate))
                if len(kept) >= count:
                    if bounds is None:
                        return [of for _, _, of in kept]
                    del kept[count:]
                    limit_s = min(limit_s, kept[-1][0])
        return [of for _, _, of in kept]

    def _layout_candidates(self, layout: Layout) -> list[Candidate]:
        """List the candidates of a layout that are trained, cheapest first."""
        setting = self._pricer.setting
        known = [
            of
            for of in layout_candidates(
                setting, layout, packs_per_step=self._packs_per_step, recomputes=(self._recompute,)
            )
            if is_supported(of)
        ]
        priced = [(_rounded(self._pricer.quick_s(of)), of.microbatches, number) for number, of in enumerate(known)]
        return [known[number] for _, _, number in sorted(priced)]


def _simulations(of: Candidate, most: int, slots_max: int) -> int:
    if of.schedule is None:
        return 1
    slots = 3 * of.layout.pp * stages_per_rank(of.schedule, of.chunks) * simulated_microbatches(of)
    return max(1, min(most, slots_max // slots))


def _order(estimate: Estimate) -> tuple[float, int, tuple[int, ...], str]:
    """Fastest first; of equals the simplest: fewest microbatches, fewest stages, uncut packs, whole experts."""
    of = estimate.candidate
    simple = (of.layout.pp, of.layout.cp * of.layout.tp, of.layout.ep)
    return _rounded(estimate.step_s), of.microbatches, simple, str(of)


def _rounded(seconds: float) -> float:
    """Drop meaningless digits."""
    return float(f"{seconds:.5g}")
