"""Generated runs of gangs: how long each rank computes and exchanges in each step, and what launchers see of it.

A rank's time is a fixed part, and parts that follow its tokens, the squares of its documents, its images and the rows
of its experts; the work that its page shows weighs these parts by a model that is wrong by up to a quarter each. The
generator knows nothing of the detector but the states of ranks; the detector can't import it, since it lies outside
the sources.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

from polyreme_api.rank_state import ExchangeKind, RankActivity, RankState

LOOK_S = 2.0
"""How often a launcher looks at its ranks, and the leader at what launchers sent."""
PARTS = ("tokens", "squares", "images", "rows")
GROUP_SLOWDOWN = 3.0
BURST_STEPS_MAX, BURSTS_APART = 7, 20
"""Steps of a burst, and between two of one rank: what is slow in more of them is no burst."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is fixed in a run; steps are drawn from it."""

    seed: int
    ranks: int
    pp: int
    ep: int
    step_s: float
    fixed: float
    """Share of a step that does not follow its work."""
    weights: dict[str, float]
    """True share of each part in the rest."""
    believed: dict[str, float]
    """The same by the model."""
    load: tuple[dict[str, float], ...]
    """By rank: its usual amount of each part."""
    spread: float
    """How much amounts differ from step to step."""
    noise: float
    device: tuple[float, ...]
    """By rank: how long its device takes, about 1."""
    slow_rank: int = -1
    slow_group: int = -1
    slowdown: float = 1.0
    slow_from: int = 0
    """Step from which on the rank or group is slow."""

    @property
    def blocks(self) -> dict[ExchangeKind, int]:
        """Ranks of a group, by kind of exchange."""
        return {ExchangeKind.EXPERTS: self.ep, ExchangeKind.STAGE: self.ranks // self.pp}


def quiet(seed: int) -> Run:
    """Draw a run in which nothing is slow: uneven packs, ranks with more images, hot experts, all kinds of noise."""
    rng = random.Random(seed)
    ranks, pp, ep = rng.choice(((8, 1, 1), (8, 1, 4), (8, 2, 2), (16, 1, 4), (16, 2, 8), (16, 4, 2), (4, 1, 2)))
    weights = {part: rng.uniform(0.1, 1.0) for part in PARTS}
    if rng.random() < 0.3:
        weights["images"] = 0.0
    scale = sum(weights.values())
    weights = {part: weight / scale for part, weight in weights.items()}
    return Run(
        seed=seed,
        ranks=ranks,
        pp=pp,
        ep=ep,
        step_s=rng.choice((2.0, 3.0, 6.0, 15.0, 40.0)),
        fixed=rng.choice((0.0, 0.05, 0.2, 0.5, 0.8)),
        weights=weights,
        believed={part: weight * rng.uniform(0.8, 1.25) for part, weight in weights.items()},
        load=tuple(_load(rng) for _ in range(ranks)),
        spread=rng.choice((0.02, 0.05, 0.1)),
        noise=rng.choice((0.01, 0.03, 0.08)),
        device=tuple(rng.gauss(1.0, 0.015) for _ in range(ranks)),
    )


def _load(rng: random.Random) -> dict[str, float]:
    """Most ranks have what others have; some always more or less of one part."""
    load = dict.fromkeys(PARTS, 1.0)
    if rng.random() < 0.2:
        load[rng.choice(("squares", "images", "rows"))] = rng.uniform(0.4, 2.5)
    return load


def slowed(seed: int, *, by: float = 1.3) -> Run:
    """Draw a run of 8 ranks, in which one becomes slow; its usual load is that of the others."""
    rng, run = random.Random(-seed - 1), quiet(seed)
    even = tuple(dict.fromkeys(PARTS, 1.0) for _ in range(8))
    pp, ep = rng.choice(((1, 1), (1, 4), (2, 2)))
    device = tuple(rng.gauss(1.0, 0.015) for _ in range(8))
    return dataclasses.replace(
        run,
        ranks=8,
        pp=pp,
        ep=ep,
        load=even,
        device=device,
        slow_rank=rng.randrange(8),
        slowdown=by,
        slow_from=rng.randrange(1, 200),
    )


def slow_group(seed: int) -> Run:
    """Draw a run in which the exchanges of one group of four become slow."""
    rng, run = random.Random(-seed - 1), quiet(seed)
    device, load = tuple(rng.gauss(1.0, 0.015) for _ in range(16)), tuple(_load(rng) for _ in range(16))
    return dataclasses.replace(
        run,
        ranks=16,
        pp=1,
        ep=4,
        load=load,
        device=device,
        slow_group=rng.randrange(4),
        slowdown=GROUP_SLOWDOWN,
        slow_from=rng.randrange(1, 200),
    )


@dataclasses.dataclass(slots=True)
class _Times:
    """One step of one rank."""

    computed_s: float
    work: float
    experts_s: float = 0.0
    stage_s: float = 0.0


class Steps:
    """Draws a run's steps one after another."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self._run, self._rng = run, rng
        self._bursts: dict[int, tuple[int, float]] = {}
        """By rank: steps that are left of a burst, less than 0 after it, and how much slower it is."""
        self._number = 0
        self._saves_every = rng.randrange(20, 200)

    def next(self) -> list[_Times]:
        """Return the times of all ranks in the next step."""
        run, rng = self._run, self._rng
        self._number += 1
        times = [self._computes(rank) for rank in range(run.ranks)]
        bases = {group: 0.1 * run.step_s * rng.lognormvariate(0.0, 0.25) for group in range(run.ranks // run.ep)}
        if run.slow_group >= 0 and self._number >= run.slow_from:
            bases[run.slow_group] *= run.slowdown
        inner = run.ranks // run.pp
        for size, name in ((run.ep, "experts_s"), (inner, "stage_s")):
            if size == 1:
                continue
            for first in range(0, run.ranks, size):
                members = times[first : first + size]
                # Those that come early wait for the last one; the exchange itself takes as long for all.
                last_s = max(each.computed_s + each.experts_s for each in members)
                base_s = bases[first // size] if name == "experts_s" else 0.05 * run.step_s
                for each in members:
                    waits_s = last_s - each.computed_s - each.experts_s
                    setattr(each, name, base_s + waits_s)
        return times

    def _computes(self, rank: int) -> _Times:
        run, rng = self._run, self._rng
        amounts = {part: run.load[rank][part] * max(0.1, rng.gauss(1.0, run.spread)) for part in PARTS}
        amounts["tokens"] = 1.0
        # A stage has its own layers, and only the first one images.
        stage = rank // (run.ranks // run.pp)
        amounts["images"] *= stage == 0
        size = 1.0 + 0.3 * stage
        follows = sum(run.weights[part] * amount for part, amount in amounts.items())
        seconds = run.step_s * size * (run.fixed + (1 - run.fixed) * follows)
        seconds *= run.device[rank] * rng.lognormvariate(0.0, run.noise) * self._burst(rank)
        if rank == run.slow_rank and self._number >= run.slow_from:
            seconds *= run.slowdown
        work = sum(run.believed[part] * amount for part, amount in amounts.items())
        return _Times(computed_s=seconds, work=1e9 * size * work)

    def _burst(self, rank: int) -> float:
        """Ranks pause now and then, and rank 0 while it saves."""
        left, factor = self._bursts.get(rank, (-BURSTS_APART, 1.0))
        if left <= -BURSTS_APART and self._rng.random() < 0.01:
            left, factor = self._rng.randrange(1, BURST_STEPS_MAX + 1), self._rng.uniform(1.2, 4.0)
        if rank == 0 and self._number % self._saves_every == 0:
            left, factor = self._rng.randrange(1, 5), self._rng.uniform(1.1, 2.0)
        self._bursts[rank] = left - 1, factor
        return factor if left > 0 else 1.0


def looks(run: Run, steps: int) -> Iterator[tuple[int, Sequence[RankState]]]:
    """Yield what the leader sees at each look, with the number of the last step that all have ended.

    Launchers look at their ranks at different moments; ranks are kept together by the exchanges at the end of a step.
    """
    rng = random.Random(run.seed + 7)
    drawn = Steps(run, rng)
    phases = [rng.uniform(0.0, LOOK_S) for _ in range(run.ranks)]
    newest = {rank: RankState(rank=rank) for rank in range(run.ranks)}
    now_s = ended_s = 0.0
    ends: list[tuple[float, list[RankState]]] = []
    for number in range(1, steps + 1):
        times = drawn.next()
        took_s = max(each.computed_s + each.experts_s + each.stage_s for each in times)
        if rng.random() < 0.02:  # an evaluation or a checkpoint
            took_s += rng.uniform(10.0, 200.0)
        ended_s += took_s
        ends = [*ends[-3:], (ended_s, [_state(rank, number, each) for rank, each in enumerate(times)])]
        while now_s + LOOK_S <= ended_s:
            now_s += LOOK_S
            for rank in range(run.ranks):
                seen = [states[rank] for at_s, states in ends[:-1] if at_s <= now_s - phases[rank]]
                newest[rank] = seen[-1] if seen else newest[rank]
            yield number - 1, list(newest.values())


def _state(rank: int, number: int, times: _Times) -> RankState:
    return RankState(
        rank=rank,
        activity=RankActivity.STEP,
        step=number + 1,
        computed_us=0 if number == 1 else int(times.computed_s * 1e6),
        work=int(times.work),
        experts_us=int(times.experts_s * 1e6),
        stage_us=int(times.stage_s * 1e6),
    )
