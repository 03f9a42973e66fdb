"""Rules that the detector is compared with: two published ones, and detectors that ask for one signal only.

DLRover's and NVRx's rules are written from their documents and issues: they see when steps end and when other
activities begin, as a trainer reports them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.hang.traces import Trace

from polyreme_api.rank_state import RankActivity, RankState

DLROVER_STEP_S, DLROVER_OTHER_S = 600.0, 7200.0
"""Ten minutes without a step, two hours in steps that are known to be long (issues 1727, 1730, 1749)."""
NVRX_FACTOR, NVRX_FIRST_S, NVRX_LEARNED_AFTER = 5.0, 3600.0, 16
"""Five times the longest interval between heartbeats once enough were seen, before that an hour."""


def dlrover(found: Trace) -> float | None:
    """When DLRover's rule restarts; None: never."""
    events, last_s, activity = list(found.events()), 0.0, RankActivity.STARTING
    for at_s, now in [*events, (_end_of(found), None)]:
        limit_s = DLROVER_STEP_S if activity is RankActivity.STEP else DLROVER_OTHER_S
        if at_s > last_s + limit_s:
            return last_s + limit_s
        if now is not None:
            last_s, activity = at_s, now
    return None


def nvrx(found: Trace) -> float | None:
    """When NVRx' rule restarts; None: never. Heartbeats come with steps; it has learned within this run."""
    last_s, longest_s, count = 0.0, 0.0, 0
    steps = [at_s for at_s, activity in found.events() if activity is RankActivity.STEP]
    for at_s in [*steps, _end_of(found)]:
        limit_s = NVRX_FIRST_S if count < NVRX_LEARNED_AFTER else NVRX_FACTOR * longest_s
        if at_s > last_s + limit_s:
            return last_s + limit_s
        longest_s, last_s, count = max(longest_s, at_s - last_s) if count else longest_s, at_s, count + 1
    return None


def _end_of(found: Trace) -> float:
    return float("inf") if found.hang is not None else sum(span.seconds for span in found.spans)


def time_alone(seen: Iterator[tuple[float, Sequence[RankState] | None]], limit_s: float = 60.0) -> float | None:
    """Planted: restart when no rank has advanced for a minute, whatever ranks do."""
    moves: list[int] = []
    moved_s = 0.0
    for now_s, states in seen:
        if states is None or (now := [state.moves for state in states]) != moves:
            moves, moved_s = [] if states is None else now, now_s
        elif now_s - moved_s > limit_s:
            return now_s
    return None


def relation_alone(seen: Iterator[tuple[float, Sequence[RankState] | None]], looks: int = 3) -> float | None:
    """Planted: restart when ranks wait for one that is in no exchange, or all idle, at three looks in a row."""
    held = 0
    for now_s, states in seen:
        waits = [bool(state.wait) for state in states or ()]
        held = held + 1 if states and (any(waits) or all(state.idle for state in states)) else 0
        if held >= looks:
            return now_s
    return None
