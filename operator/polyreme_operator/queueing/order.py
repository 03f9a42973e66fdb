"""Scheduling order of waiting jobs: priority, then the fair share of their queues, then age.

Waiting raises a job's priority by one point per ``aging_s`` of its queue. Among jobs of equal priority the tree decides
from the root downwards: at each cohort the child with the smallest share goes first, and with equal shares the child
whose next job is older. Jobs of a class that was refused are skipped.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from polyreme_operator.queueing.fair_share import Shares
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.queueing.waiting import Age, LineCursor, WaitingIndex
from polyreme_operator.types.queues import StopPolicy, Waiting

Rank: TypeAlias = tuple[int, Age]
"""Negated effective priority and age of a job: the smallest goes first within its queue."""
Claim: TypeAlias = tuple[int, float, Age]
"""The same with the share of the queue or cohort between them: the smallest goes first among siblings."""


def scheduling_order(
    waiting: WaitingIndex | Iterable[Waiting], tree: QueueTree, shares: Shares, now_s: float
) -> SchedulingOrder:
    """Iterate over the jobs that may be admitted, in order; ``waiting`` must not change meanwhile."""
    index = waiting if isinstance(waiting, WaitingIndex) else WaitingIndex(waiting)
    return SchedulingOrder(index, tree, shares, now_s)


def first_of(index: WaitingIndex, tree: QueueTree, queue: str, now_s: float, *, limit: int) -> list[Waiting]:
    """Return the first jobs of one queue, as its status lists them."""
    cursor = _QueueCursor(index, tree, queue, now_s)
    found: list[Waiting] = []
    while len(found) < limit and (rank := cursor.peek()) is not None:
        found.append(index[rank[1][-1]])
        cursor.step()
    return found


class SchedulingOrder(Iterator[Waiting]):
    """Iterates over the waiting jobs once. The decision about a job must be reported before the next one is taken."""

    def __init__(self, index: WaitingIndex, tree: QueueTree, shares: Shares, now_s: float) -> None:
        self._index = index
        self._tree = tree
        self._shares = shares
        self._cursors: dict[str, _QueueCursor] = {}
        self._heaps: dict[str, list[tuple[Claim, int, str, bool]]] = {}
        """By cohort (empty: above all roots): claim, version, child, and whether it is for the cohort's own jobs.
        Entries of an older version are stale."""
        self._versions: dict[tuple[str, bool], int] = {}
        self._serial = itertools.count()
        self._owner: dict[int, str] = {}
        self._stale: dict[str, None] = {}
        """Queues whose claims must be recomputed, since a job was passed, refused or admitted."""
        for queue in sorted(index.queues()):
            if tree.in_order(queue) and tree.stop_policy(queue) is StopPolicy.NONE:
                self._cursors[queue] = _QueueCursor(index, tree, queue, now_s)
        above: dict[str, tuple[int, str]] = {}
        for queue in self._cursors:
            self._claim_own(queue)
            path = self._path_to_root(queue)
            above |= {child: (at - len(path), path[at + 1]) for at, child in enumerate(path[:-1])}
        for child in sorted(above, key=lambda child: (above[child][0], child)):
            self._claim_for(child, above[child][1])

    def __next__(self) -> Waiting:
        for stale in self._stale:
            self._renew(stale)
        self._stale.clear()
        queue = self._first("")
        if queue is None:
            raise StopIteration
        cursor = self._cursors[queue]
        rank = cursor.peek()
        assert rank is not None
        cursor.step()
        self._stale[queue] = None
        job = self._index[rank[1][-1]]
        self._owner[job.kind] = queue
        return job

    def refuse(self, kind: int) -> None:
        """Skip a class from now on, since one of its jobs did not fit."""
        queue = self._owner.get(kind)
        if queue is not None:
            self._cursors[queue].refused.add(kind)
            self._stale[queue] = None

    def admitted(self, job: Waiting) -> None:
        """Add an admitted job to the shares."""
        self._shares.charge(job.queue, job.requests, job.workers)
        self._stale[job.queue] = None

    def _first(self, cohort: str) -> str | None:
        """Return the queue below a cohort whose job is next."""
        while (top := self._top(cohort)) is not None:
            _, _, child, own = top
            if own:
                return child
            cohort = child
        return None

    def _top(self, cohort: str) -> tuple[Claim, int, str, bool] | None:
        heap = self._heaps.get(cohort, [])
        while heap and heap[0][1] != self._versions.get((heap[0][2], heap[0][3])):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _renew(self, queue: str) -> None:
        """Recompute the claims of a queue and the cohorts above it."""
        self._claim_own(queue)
        for child, above in itertools.pairwise(self._path_to_root(queue)):
            self._claim_for(child, above)

    def _path_to_root(self, queue: str) -> tuple[str, ...]:
        """Return the queue, the cohorts above it, and the empty name above all roots."""
        return (*(self._tree.path(queue) or (queue,)), "")

    def _claim_own(self, queue: str) -> None:
        self._claim(queue, queue, self._cursors[queue].peek(), self._shares.own(queue), own=True)

    def _claim_for(self, child: str, above: str) -> None:
        """Insert the best claim below a queue or cohort among its siblings' claims."""
        top = self._top(child)
        best = None if top is None else (top[0][0], top[0][2])
        self._claim(above, child, best, self._shares.of(child), own=False)

    def _claim(self, cohort: str, child: str, rank: Rank | None, share: float, *, own: bool) -> None:
        version = next(self._serial)
        self._versions[child, own] = version
        if rank is not None:
            heapq.heappush(self._heaps.setdefault(cohort, []), ((rank[0], share, rank[1]), version, child, own))


class _QueueCursor:
    """Iterates over the jobs of one queue by effective priority, then age."""

    def __init__(self, index: WaitingIndex, tree: QueueTree, queue: str, now_s: float) -> None:
        self.refused: set[int] = set()
        self._now_s = now_s
        self._aging_s = tree.view(queue).aging_s
        self._lines = [(priority, LineCursor(line, self.refused)) for priority, line in index.lines(queue)]
        self._heap: list[tuple[Rank, int]] = []
        for at in range(len(self._lines)):
            self._push(at)

    def peek(self) -> Rank | None:
        """Return the job that is next; None at the end."""
        while self._heap:
            rank, at = self._heap[0]
            if self._lines[at][1].peek() == rank[1]:
                return rank
            # Its class was refused meanwhile, so the next job has another rank.
            heapq.heappop(self._heap)
            self._push(at)
        return None

    def step(self) -> None:
        """Pass the job that ``peek`` returned."""
        _, at = heapq.heappop(self._heap)
        self._lines[at][1].step()
        self._push(at)

    def _push(self, at: int) -> None:
        priority, line = self._lines[at]
        age = line.peek()
        if age is not None:
            points = int(max(0.0, self._now_s - age[0]) // self._aging_s) if self._aging_s > 0 else 0
            heapq.heappush(self._heap, ((-(priority + points), age), at))
