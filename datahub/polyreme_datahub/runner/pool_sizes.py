"""Number of workers that a pool needs, from its backlog and the time that an item takes. Pure.

A pool is made larger at once, and smaller only after its backlog has asked for less for a while: a worker that starts
costs seconds, and one that ends gives its items back. With nothing to do, a pool has no workers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence

from polyreme_datahub.registry.backlog import Backlog

ASSUMED_ITEM_S = 10.0
"""Time of an item of an operation that has not ended one yet."""
WINDOW_S = 180.0
"""Span over which the time of an item is measured."""
SAMPLES_MAX = 1_000
"""Looks at the leases that are kept."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What an installation allows of one pool."""

    least: int = 0
    most: int = 8
    threads: int = 2
    """Items that one worker does at once."""
    drain_s: float = 120.0
    """Time in which the backlog shall be done."""
    cooldown_s: float = 60.0
    """Time for which a pool stays larger than its backlog asks for."""
    tolerance: float = 0.25
    """A pool is made smaller only if it is this part larger than its backlog asks for, or that is the least."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """A pool as it was last sized."""

    size: int
    low_since_s: float | None = None
    """Since when its backlog asks for less."""


def pool_sizes(
    backlog: Sequence[Backlog],
    item_s: Mapping[str, float],
    *,
    states: Mapping[str, PoolState],
    limits: Mapping[str, PoolLimits],
    now_s: float,
) -> dict[str, PoolState]:
    """Return the next state of each pool.

    Args:
        backlog: Open items, by operation and device.
        item_s: Time of an item of each operation [s], where it is known.
        states: Pools as they are, by device; one that is not named has no workers.
        limits: Pools that there are, by device.
        now_s: A clock that never jumps [s].
    """
    sizes = {}
    for device, allowed in limits.items():
        mine = [one for one in backlog if one.device == device]
        wanted = workers_wanted(mine, item_s, allowed)
        sizes[device] = resized(states.get(device, PoolState(size=0)), wanted, allowed, now_s=now_s)
    return sizes


def workers_wanted(backlog: Sequence[Backlog], item_s: Mapping[str, float], limits: PoolLimits) -> int:
    """Return how many workers do a backlog in ``limits.drain_s``, within the limits."""
    items = sum(one.items for one in backlog)
    if not items:
        return limits.least
    work_s = sum(one.items * item_s.get(one.operation, ASSUMED_ITEM_S) for one in backlog)
    # More threads than items would have nothing to do.
    threads = min(items, math.ceil(work_s / limits.drain_s))
    return min(limits.most, max(1, limits.least, math.ceil(threads / limits.threads)))


def resized(state: PoolState, wanted: int, limits: PoolLimits, *, now_s: float) -> PoolState:
    """Return the next state of a pool whose backlog asks for some workers."""
    if wanted >= state.size or state.size > limits.most:
        return PoolState(size=min(limits.most, wanted))
    if wanted > limits.least and wanted >= state.size * (1 - limits.tolerance):
        return PoolState(size=state.size)
    since_s = now_s if state.low_since_s is None else state.low_since_s
    if now_s - since_s < limits.cooldown_s:
        return PoolState(size=state.size, low_since_s=since_s)
    return PoolState(size=wanted)


class ItemTimes:
    """Measures how long items take, over all workers, from what the registry shows.

    By Little's law the mean time of an item is the mean number of leased items over the rate at which items end.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=SAMPLES_MAX)
        self._known: dict[str, float] = {}

    def since_s(self, now_s: float) -> float:
        """Return since when ended items count for the next look."""
        return max(self._looks[0][0] if self._looks else now_s, now_s - WINDOW_S)

    def look(self, backlog: Sequence[Backlog], done: Mapping[str, int], *, now_s: float) -> dict[str, float]:
        """Take one look; return the time of an item of each operation that is known [s].

        Args:
            backlog: Open items.
            done: Items of each operation that ended since ``since_s``.
            now_s: The time, by the clock that notes when items end [s].
        """
        leased: dict[str, int] = {}
        for one in backlog:
            leased[one.operation] = leased.get(one.operation, 0) + one.leased
        self._looks.append((now_s, leased))
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()
        busy_s: dict[str, float] = {}
        for (begun_s, held), (ended_s, _) in itertools.pairwise(self._looks):
            span_s = ended_s - max(begun_s, now_s - WINDOW_S)
            for operation, count in held.items():
                busy_s[operation] = busy_s.get(operation, 0.0) + count * max(0.0, span_s)
        for operation, spent_s in busy_s.items():
            if (ended := done.get(operation, 0)) and spent_s > 0:
                self._known[operation] = spent_s / ended
        return dict(self._known)
