"""Planted detectors, each without one part of the rule: they must name ranks in quiet runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from benchmarks.straggler.traces import Run

from polyreme_api.rank_state import RankState

SLOW, ROUNDS, OF_THEM = 1.15, 16, 14
Seen = Iterator[tuple[int, Sequence[RankState]]]
Measure = Callable[[RankState], float]
Named = Iterator[tuple[int, tuple[int, ...]]]


def _slow(
    measure: Callable[[RankState], float], *, rounds: int = ROUNDS, of_them: int = OF_THEM
) -> Callable[..., Named]:
    """Make a rule: a rank is named whose measure exceeds the median of its stage in nearly all of the last rounds."""

    def rule(run: Run, seen: Seen) -> Named:
        steps, inner = [0] * run.ranks, run.ranks // run.pp
        last: list[deque[bool]] = [deque(maxlen=rounds) for _ in range(run.ranks)]
        for step, states in seen:
            if any(state.step <= before or not state.computed_us for state, before in zip(states, steps, strict=True)):
                continue
            steps = [state.step for state in states]
            for first in range(0, run.ranks, inner):
                values = [measure(state) for state in states[first : first + inner]]
                usual = sorted(values)[(inner - 1) // 2]
                for rank, value in enumerate(values, first):
                    last[rank].append(value > SLOW * usual)
                    if sum(last[rank]) >= of_them:
                        yield step, (rank,)

    return rule


def groups_by_mean(run: Run, seen: Seen) -> Named:
    """Planted: a group's time is the mean of its members', so that it waits for its ranks."""
    rounds: dict[int, deque[bool]] = {}
    for step, states in seen:
        for first in range(0, run.ranks, run.ep):
            mean = sum(state.experts_us for state in states[first : first + run.ep]) / run.ep
            usual = sorted(state.experts_us for state in states)[(run.ranks - 1) // 2]
            slow = rounds.setdefault(first, deque(maxlen=ROUNDS))
            slow.append(usual > 0 and mean > 2.0 * usual)
            if sum(slow) >= OF_THEM and 1 < run.ep < run.ranks:
                yield step, tuple(range(first, first + run.ep))


RULES = {
    "time_alone": _slow(lambda state: state.computed_us),
    "time_for_work_alone": _slow(lambda state: state.computed_us / max(1, state.work)),
    "one_step": _slow(lambda state: state.computed_us, rounds=1, of_them=1),
    "groups_by_mean": groups_by_mean,
}
