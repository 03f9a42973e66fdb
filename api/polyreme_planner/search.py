"""Candidates of a plan, layout x schedule x recomputation x microbatch, and the cost of each.

A candidate is priced by its fullest rank, in microseconds; the finalists (``automatic.py``) are simulated on their
schedule with layers split by cost.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

from polyreme_planner.costs import Recompute, Setting, part_times, transfer_s
from polyreme_planner.hardware import Pattern
from polyreme_planner.layout import Layout, divisors, gives_each_packs, misfits, packs_of_rank, ulysses_degree
from polyreme_planner.memory import Memory, mean_held, memory_of, update_bytes
from polyreme_planner.model_parts import all_parts
from polyreme_planner.pipeline_simulation import Program, Simulated, program
from polyreme_planner.schedules import V_SHAPED, Schedule, ranks_of_stages, schedule_misfits, stages_per_rank
from polyreme_planner.stage_split import ModelTimes, Split, balanced_split, best_split, least_layers
from polyreme_planner.traffic import Moment, StepExchange, step_exchanges

ROUNDS_PLAYED = 4
"""Microbatches that are simulated, in multiples of the pipeline's ranks; further ones continue at the same pace."""
MICROBATCH_PACKS_MAX = 8
BACKWARD_SHARE = 2 / 3
"""Of a pass: a backward makes two products for each of the forward's."""
TP_MAX, CP_MAX, PP_MAX = 16, 64, 64
CHUNKS = (3, 4, 8)
"""Stages per rank that are tried for interleaved schedules, after two: more shrink the bubble but send more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train."""

    layout: Layout
    schedule: Schedule | None
    """Order of the pipeline; None without one."""
    recompute: Recompute
    microbatch_packs: int
    microbatches: int
    chunks: int | None = None
    """Stages of a rank if the schedule is interleaved; None for two."""

    def __str__(self) -> str:
        """Name it in one line."""
        schedule = f" {self.schedule}" if self.schedule else ""
        stages = "" if self.chunks is None else f", {self.chunks} stages per rank"
        packs = f"{self.microbatches} x {self.microbatch_packs} packs"
        again = "" if self.recompute is Recompute.NONE else f", recompute {self.recompute}"
        return f"{self.layout}{schedule}, {packs}{stages}{again}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Expected time and memory of a candidate."""

    candidate: Candidate
    split: Split
    step_s: float
    bubble: float
    memory: Memory
    shares_s: dict[str, float]
    """Time of the fullest rank: compute, exchanges by axis, bubble, gradients."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search, best first."""

    best: Estimate | None
    runners_up: tuple[tuple[Estimate, str], ...]
    """Other layouts, and why each lost."""
    leanest: Estimate | None
    """If nothing fits: the candidate that needs least memory."""
    examined: int
    too_large: int
    """Candidates that do not fit the memory."""


def candidates(setting: Setting, *, world: int, packs_per_step: int) -> Iterator[Candidate]:
    """Yield all candidates of a world whose numbers come out even."""
    for layout in layouts(setting, world=world, packs_per_step=packs_per_step):
        yield from layout_candidates(setting, layout, packs_per_step=packs_per_step)


def layout_candidates(
    setting: Setting, layout: Layout, *, packs_per_step: int, recomputes: Sequence[Recompute] = tuple(Recompute)
) -> Iterator[Candidate]:
    """Yield the candidates of one layout: without stages one microbatch of all packs is among them."""
    share = packs_of_rank(packs_per_step, layout.dp)
    orders: list[tuple[Schedule | None, int | None]] = [(None, None)]
    if layout.pp > 1:
        orders = [(schedule, None) for schedule in Schedule]
        orders += [(Schedule.INTERLEAVED, chunks) for chunks in CHUNKS]
    whole = {share} if layout.pp == 1 else set()
    for packs in sorted({*divisors(share, MICROBATCH_PACKS_MAX), *whole}):
        microbatches = share // packs
        for schedule, chunks in orders:
            if schedule is not None and not _runs(setting, schedule, layout.pp, microbatches, chunks):
                continue
            for recompute in recomputes:
                yield Candidate(
                    layout=layout,
                    schedule=schedule,
                    recompute=recompute,
                    microbatch_packs=packs,
                    microbatches=microbatches,
                    chunks=chunks,
                )


def layouts(setting: Setting, *, world: int, packs_per_step: int) -> Iterator[Layout]:
    """Yield the layouts of a world that the model's sizes allow."""
    d, tokens = setting.shape.decoder, setting.mix.sequence_tokens
    # Sharded parameters do not go with stages (``job.spec``).
    stages_max = 1 if setting.numerics.sharded_parameters else min(PP_MAX, d.layers + 2)
    for pp in divisors(world, stages_max):
        for tp in divisors(math.gcd(world // pp, d.heads), min(TP_MAX, setting.hardware.near_devices)):
            for cp in divisors(world // pp // tp, CP_MAX):
                dp = world // pp // tp // cp
                if not gives_each_packs(packs_per_step, dp):
                    continue
                ulysses = ulysses_degree(cp, d.heads // tp)
                for ep in divisors(math.gcd(dp * cp * tp, d.experts), d.experts):
                    layout = Layout(dp=dp, ep=ep, pp=pp, cp=cp, tp=tp, ulysses=ulysses)
                    if not misfits(
                        layout, world=world, shape=setting.shape, packs_per_step=packs_per_step, pack_tokens=tokens
                    ):
                        yield layout


def _runs(setting: Setting, schedule: Schedule, ranks: int, microbatches: int, chunks: int | None) -> bool:
    stages = ranks * stages_per_rank(schedule, chunks)
    fits = sum(least_layers(stages)) <= setting.shape.decoder.layers
    return fits and not schedule_misfits(schedule, ranks=ranks, microbatches=microbatches)


class Pricer:
    """Prices candidates of one setting; intermediate results that several share are cached."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._times: dict[tuple[Layout, int, Recompute], tuple[ModelTimes, dict[str, float]]] = {}
        self._layers_s: dict[tuple[Layout, int, Recompute], float] = {}
        self._ends: dict[tuple[Layout, int, bool], tuple[float, dict[Moment, float]]] = {}
        self._counts = collections.Counter(all_parts(setting.shape))

    def bound_s(self, layout: Layout, packs_per_rank: int) -> float:
        """Bound a layout's step from below, whatever its schedule: products and exchanges of the mean rank [seconds].

        Args:
            layout: Degrees.
            packs_per_rank: Of a data-parallel rank.
        """
        packs = min(packs_per_rank, MICROBATCH_PACKS_MAX)
        alone = Candidate(
            layout=layout, schedule=None, recompute=Recompute.NONE, microbatch_packs=packs, microbatches=1
        )
        times, _ = self.times(alone)
        whole_s = times.first.total_s + times.last.total_s + self._layers_s[layout, packs, Recompute.NONE]
        fullest_s = max(whole_s / layout.pp, times.first.total_s, times.last.total_s)
        once_s = self._once_per_step_s(layout, whole_s / layout.pp)
        return packs_per_rank / packs * fullest_s + once_s

    def times(self, of: Candidate) -> tuple[ModelTimes, dict[str, float]]:
        """Time of the parts, and the exchanges of all parts together by axis [seconds per microbatch]."""
        key = (of.layout, of.microbatch_packs, of.recompute)
        if key not in self._times:
            priced = part_times(self.setting, of.layout, packs=of.microbatch_packs, recompute=of.recompute)
            exchanged: dict[str, float] = {}
            for part, count in self._counts.items():
                for axis, taken_s in priced.exchanged_s[part].items():
                    exchanged[axis] = exchanged.get(axis, 0.0) + count * taken_s
            times = priced.model_times(self.setting.shape)
            self._times[key] = times, exchanged
            self._layers_s[key] = sum(layer.total_s for layer in times.layers)
        return self._times[key]

    def quick_s(self, of: Candidate) -> float:
        """Compute a bound by the fullest rank and the way through the pipeline [seconds]."""
        times, _ = self.times(of)
        layers_s = self._layers_s[of.layout, of.microbatch_packs, of.recompute]
        whole_s = times.first.total_s + times.last.total_s + layers_s
        pp = of.layout.pp
        once_s = self._once_per_step_of(of, whole_s / pp)
        if of.schedule is None:
            return of.microbatches * whole_s + once_s
        together = ranks_of_stages(of.schedule, pp)[-1] == 0
        heaviest_s = (
            times.first.total_s + times.last.total_s if together else max(times.first.total_s, times.last.total_s)
        )
        fullest_s = max(whole_s / pp, heaviest_s)
        through = {
            Schedule.ONE_F_ONE_B: 1.0,
            Schedule.INTERLEAVED: 1 / stages_per_rank(of.schedule, of.chunks),
            Schedule.ZBV: 0.2,
            Schedule.DUAL_PIPE_V: 0.3,
        }
        return of.microbatches * fullest_s + (pp - 1) * whole_s / pp * through[of.schedule] + once_s

    def estimated(self, of: Candidate) -> Estimate:
        """Compute the memory with layers split evenly by cost, and price by the fullest rank."""
        times, _ = self.times(of)
        split = self._dealt(of, times)
        return Estimate(
            candidate=of, split=split, step_s=self.quick_s(of), bubble=0.0, memory=self._memory(of, split), shares_s={}
        )

    def simulated(self, of: Candidate, simulations: int) -> Estimate:
        """Split by cost under the memory limit, and simulate the schedule."""
        times, _ = self.times(of)
        return self.divided(of, (len(times.layers),) if of.schedule is None else self._split(of, times, simulations))

    def divided(self, of: Candidate, split: Split) -> Estimate:
        """Simulate the schedule with these layers in each stage."""
        times, exchanged_s = self.times(of)
        microbatches = of.microbatches
        if of.schedule is None:
            busy_s = times.of_stages(split)[0].total_s * microbatches
            makespan_s, bubble_s = busy_s, 0.0
        else:
            makespan_s, busy_s = self._pipeline(of, times, split)
            bubble_s = makespan_s - busy_s
        exchanges = {axis: taken * microbatches / of.layout.pp for axis, taken in exchanged_s.items()}
        once_s = self._once_per_step_of(of, busy_s / microbatches)
        shares = {"compute": busy_s - sum(exchanges.values()), **exchanges, "bubble": bubble_s, "gradients": once_s}
        step_s = makespan_s + once_s
        return Estimate(
            candidate=of,
            split=split,
            step_s=step_s,
            bubble=bubble_s / makespan_s if makespan_s else 0.0,
            memory=self._memory(of, split),
            shares_s=shares,
        )

    def _split(self, of: Candidate, times: ModelTimes, simulations: int) -> Split:
        """Split the layers by cost under the memory limit."""
        assert of.schedule is not None

        def fits(split: Split) -> bool:
            return self._memory(of, split).total_bytes <= self.setting.hardware.usable_bytes

        split, _ = best_split(
            times,
            schedule=of.schedule,
            ranks=of.layout.pp,
            microbatches=simulated_microbatches(of),
            chunks=of.chunks,
            transfer_s=transfer_s(self.setting, of.layout, packs=of.microbatch_packs),
            simulations=simulations,
            allowed=fits,
        )
        return split

    def _pipeline(self, of: Candidate, times: ModelTimes, split: Split) -> tuple[float, float]:
        """Return the makespan, and the mean of the ranks' work [seconds]."""
        assert of.schedule is not None
        pp, between_s = of.layout.pp, transfer_s(self.setting, of.layout, packs=of.microbatch_packs)
        shown = simulated_microbatches(of)
        stages = times.of_stages(split)
        took_s = _program(of, shown).makespan_s(stages, transfer_s=between_s)
        if shown < of.microbatches:
            before = shown - pp
            before_s = _program(of, before).makespan_s(stages, transfer_s=between_s)
            took_s += (of.microbatches - shown) * (took_s - before_s) / pp
        work_s = [0.0] * pp
        for rank, stage in zip(ranks_of_stages(of.schedule, pp, of.chunks), stages, strict=True):
            work_s[rank] += stage.total_s * of.microbatches
        # Microbatches beyond the simulated ones are extrapolated, which may come out shorter than the fullest rank's
        # work.
        return max(took_s, *work_s), sum(work_s) / pp

    def _memory(self, of: Candidate, split: Split) -> Memory:
        return memory_of(
            self.setting,
            of.layout,
            packs=of.microbatch_packs,
            microbatches=simulated_microbatches(of),
            recompute=of.recompute,
            schedule=of.schedule,
            split=split,
        )

    def _dealt(self, of: Candidate, times: ModelTimes) -> Split:
        if of.schedule is None:
            return (len(times.layers),)
        return balanced_split(times, schedule=of.schedule, ranks=of.layout.pp, chunks=of.chunks)

    def _once_per_step_of(self, of: Candidate, pass_s: float) -> float:
        return self._once_per_step_s(of.layout, pass_s, of.microbatches, signalled=of.schedule not in V_SHAPED)

    def _once_per_step_s(
        self, layout: Layout, pass_s: float, microbatches: int = 1, *, signalled: bool = True
    ) -> float:
        """Price what a step waits for once: sums of gradients, the update, gathered parameters [seconds].

        Args:
            layout: Degrees.
            pass_s: Forward and backward of one microbatch on the mean rank, which exchanges overlap with.
            microbatches: Of a step.
            signalled: Whether the backward passes signal when a gradient is made.
        """
        update_s, took_s = self._step_exchanges_s(layout, microbatches, signalled)
        overlap_s = {
            Moment.DURING_BACKWARD: BACKWARD_SHARE * pass_s,
            Moment.DURING_PASSES: microbatches * pass_s,
            Moment.DURING_UPDATE: update_s,
            Moment.AFTER: 0.0,
        }
        return update_s + sum(max(0.0, took_s[moment] - overlap_s[moment]) for moment in took_s)

    def _step_exchanges_s(
        self, layout: Layout, microbatches: int, signalled: bool
    ) -> tuple[float, dict[Moment, float]]:
        """Price the update, and what is exchanged once a step by the moment when it runs; each once per layout."""
        if not self.setting.numerics.sharded_parameters:
            microbatches = 1  # only rows of parameters are exchanged with each of them
        key = (layout, microbatches, signalled)
        if key not in self._ends:
            took_s: dict[Moment, float] = {}
            trained = mean_held(self.setting, layout)
            found = step_exchanges(
                layout,
                self.setting.numerics,
                common=trained.common,
                routed=trained.routed,
                microbatches=microbatches,
                signalled=signalled,
            )
            for exchange in found:
                took_s[exchange.moment] = took_s.get(exchange.moment, 0.0) + self._exchange_s(exchange)
            self._ends[key] = update_bytes(self.setting, layout) / self.setting.hardware.bytes_per_s, took_s
        return self._ends[key]

    def _exchange_s(self, exchange: StepExchange) -> float:
        return self.setting.hardware.exchange_s(
            exchange.sent_bytes, group=exchange.group, pattern=Pattern.REDUCE, messages=exchange.messages
        )


def _program(of: Candidate, microbatches: int) -> Program:
    assert of.schedule is not None
    return program(of.schedule, ranks=of.layout.pp, microbatches=microbatches, chunks=of.chunks)


def simulated_microbatches(of: Candidate) -> int:
    """Simulated microbatches of a candidate."""
    return min(of.microbatches, most_simulated_microbatches(of.layout))


def most_simulated_microbatches(layout: Layout) -> int:
    """Microbatches beyond which a pipeline continues at the same pace, and holds no more."""
    return ROUNDS_PLAYED * layout.pp


def is_supported(of: Candidate) -> bool:
    """Whether this version trains it."""
    return is_compatible(of.recompute, of.schedule)


def is_compatible(recompute: Recompute, schedule: Schedule | None) -> bool:
    """Whether layers may recompute so much: separate gradients of inputs and weights would recompute a layer twice."""
    return recompute is not Recompute.FULL or schedule not in V_SHAPED


def simulate(setting: Setting, estimate: Estimate) -> Simulated | None:
    """Simulate the pipeline of an estimate once more, for its picture; None without a pipeline."""
    of = estimate.candidate
    if of.schedule is None:
        return None
    times = part_times(setting, of.layout, packs=of.microbatch_packs, recompute=of.recompute)
    order = _program(of, simulated_microbatches(of))
    stages = times.model_times(setting.shape).of_stages(estimate.split)
    return order.simulate(stages, transfer_s=transfer_s(setting, of.layout, packs=of.microbatch_packs))


def why_slower(other: Estimate, best: Estimate) -> str:
    """Return why another plan is slower than the best."""
    slower = other.step_s / best.step_s - 1
    names = set(other.shares_s) | set(best.shares_s)
    more = {name: other.shares_s.get(name, 0.0) - best.shares_s.get(name, 0.0) for name in sorted(names)}
    name = max(more, key=more.__getitem__)
    what = {"compute": "compute", "bubble": "bubble", "gradients": "gradients"}.get(name, f"{name} exchanges")
    return f"{slower:.1%} slower: {more[name]:.3g} s more of {what} per step"
