"""Sorted index of waiting jobs, so that a scheduling cycle costs only what it looks at.

Jobs of one queue, priority and class form a line, oldest first. Among the lines of a queue and priority only the heads
are kept sorted.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from polyreme_operator.types.queues import Waiting

Age: TypeAlias = tuple[float, int, str]
"""Since when a job waits, its order of arrival within that second, and its UID: the smallest goes first."""


class Line:
    """The jobs of one queue and priority."""

    def __init__(self) -> None:
        self.by_kind: dict[int, list[Age]] = {}
        self.heads: list[tuple[Age, int]] = []
        """The oldest of each kind, and the kind; sorted."""

    def add(self, age: Age, kind: int) -> None:
        """Insert a job by its age."""
        ages = self.by_kind.setdefault(kind, [])
        if not ages or age < ages[0]:
            if ages:
                self._drop_head(ages[0], kind)
            insort(self.heads, (age, kind))
        insort(ages, age)

    def remove(self, age: Age, kind: int) -> None:
        """Remove a job."""
        ages = self.by_kind[kind]
        at = bisect_left(ages, age)
        del ages[at]
        if at == 0:
            self._drop_head(age, kind)
            if ages:
                insort(self.heads, (ages[0], kind))
            else:
                del self.by_kind[kind]

    def _drop_head(self, age: Age, kind: int) -> None:
        del self.heads[bisect_left(self.heads, (age, kind))]


class LineCursor:
    """Iterates over a line by age once, skipping refused classes, without changing the line."""

    def __init__(self, line: Line, refused: AbstractSet[int]) -> None:
        self._line = line
        self._refused = refused
        self._next_head = 0
        self._followers: list[tuple[Age, int, int]] = []
        """The next job of each kind whose head has passed, with its position: a heap."""

    def peek(self) -> Age | None:
        """Return the job that is next; None at the end."""
        heads, followers = self._line.heads, self._followers
        while self._next_head < len(heads) and heads[self._next_head][1] in self._refused:
            self._next_head += 1
        while followers and followers[0][1] in self._refused:
            heapq.heappop(followers)
        head = heads[self._next_head][0] if self._next_head < len(heads) else None
        if head is None or (followers and followers[0][0] < head):
            return followers[0][0] if followers else None
        return head

    def step(self) -> None:
        """Pass the job that ``peek`` returned."""
        heads, followers = self._line.heads, self._followers
        age = self.peek()
        if followers and followers[0][0] == age:
            _, kind, at = heapq.heappop(followers)
        else:
            kind, at = heads[self._next_head][1], 0
            self._next_head += 1
        ages = self._line.by_kind[kind]
        if at + 1 < len(ages):
            heapq.heappush(followers, (ages[at + 1], kind, at + 1))


class WaitingIndex:
    """All waiting jobs. The cache adds and removes them; a scheduling cycle only reads."""

    def __init__(self, waiting: Iterable[Waiting] = ()) -> None:
        self._jobs: dict[str, Waiting] = {}
        self._lines: dict[str, dict[int, Line]] = {}
        self._counts: dict[str, int] = {}
        for job in waiting:
            self.add(job)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, uid: str) -> bool:
        return uid in self._jobs

    def __getitem__(self, uid: str) -> Waiting:
        return self._jobs[uid]

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._jobs.values())

    def add(self, job: Waiting) -> None:
        """Add or replace a job."""
        if self._jobs.get(job.uid) == job:
            return
        self.remove(job.uid)
        self._jobs[job.uid] = job
        lines = self._lines.setdefault(job.queue, {})
        lines.setdefault(job.priority, Line()).add(_age(job), job.kind)
        self._counts[job.queue] = self._counts.get(job.queue, 0) + 1

    def remove(self, uid: str) -> None:
        """Remove a job, if it is there."""
        job = self._jobs.pop(uid, None)
        if job is None:
            return
        lines = self._lines[job.queue]
        line = lines[job.priority]
        line.remove(_age(job), job.kind)
        if not line.heads:
            del lines[job.priority]
        self._counts[job.queue] -= 1
        if not lines:
            del self._lines[job.queue], self._counts[job.queue]

    def queues(self) -> AbstractSet[str]:
        """Return the names of the queues in which jobs wait."""
        return self._lines.keys()

    def count(self, queue: str) -> int:
        """Return how many jobs wait in a queue."""
        return self._counts.get(queue, 0)

    def lines(self, queue: str) -> Iterable[tuple[int, Line]]:
        """Return the priorities of a queue's jobs, each with its line."""
        return self._lines.get(queue, {}).items()


def _age(job: Waiting) -> Age:
    return job.since_s, job.arrival, job.uid
