"""Rules of a job's budget at its bucket: how many requests and bytes a second each process of it may ask for.

The budget is divided by a table of leases, which the processes replace one after another by create-if-absent (each
generation is an object of its own). A process that renews its lease takes a fair share, as far as the others leave it:
nobody's share is taken from him, he gives up what is more than fair when he renews it. So the shares of all leases that
may be in use never exceed the budget, whatever joins, dies, or is slow. A process stops asking ``SKEW_S`` before its
lease ends by its own clock, and others count it until ``SKEW_S`` after that by theirs: clocks may differ by as much as
that to either side. Pure: times are arguments.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

SKEW_S = 5.0
"""Most by which the clock of a machine may be wrong, to either side."""
LEASE_TTL_S = 45.0
RENEWED_EVERY_S = 10.0
WINDOW_S = 1.1
"""Time in which no more than a share is asked for: longer than a second, since requests may bunch on their way."""
HOLDERS_MAX = 4096
"""Leases of one job; a process that finds so many waits."""
FACTOR_MIN = 1 / 64
"""Least part of its share that a process asks for, however often it is refused."""
FACTOR_STEP = 0.05
RAISED_EVERY_S = 5.0
HALVED_EVERY_S = 1.0
"""Refusals of requests that were under way together count once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Requests and bytes a second."""

    requests: float
    bytes: float

    def __sub__(self, other: Rate) -> Rate:
        return Rate(self.requests - other.requests, self.bytes - other.bytes)

    def __mul__(self, factor: float) -> Rate:
        return Rate(self.requests * factor, self.bytes * factor)

    def most(self, other: Rate) -> Rate:
        """Return the lesser of each, and at least nothing."""
        return Rate(max(0.0, min(self.requests, other.requests)), max(0.0, min(self.bytes, other.bytes)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The share of one process."""

    holder: str
    share: Rate
    until_s: float
    """When it ends, by the clock of whoever wrote it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One generation of a job's leases."""

    generation: int = 0
    leases: tuple[Lease, ...] = ()

    def of(self, holder: str) -> Lease | None:
        """Return the lease of a process."""
        return next((lease for lease in self.leases if lease.holder == holder), None)


def renewed(table: Table, holder: str, *, budget: Rate, expected: int, now_s: float) -> Table | None:
    """Return the next generation, in which a process has a new lease; None: there are too many holders.

    Args:
        table: The newest generation.
        holder: The process.
        budget: Of the job.
        expected: Processes that the job is going to have: no share is larger than the fair one of so many.
        now_s: The time by the process' clock.
    """
    others = tuple(each for each in table.leases if each.holder != holder and each.until_s + SKEW_S > now_s)
    if len(others) >= HOLDERS_MAX:
        return None
    left = budget - _sum(each.share for each in others)
    fair = budget * (1.0 / max(expected, len(others) + 1))
    mine = Lease(holder=holder, share=fair.most(left), until_s=now_s + LEASE_TTL_S)
    return Table(generation=table.generation + 1, leases=(*others, mine))


def usable(lease: Lease | None, *, now_s: float) -> Rate:
    """Return what a process may ask for by its lease."""
    if lease is None or now_s >= lease.until_s - SKEW_S:
        return Rate(0.0, 0.0)
    return lease.share


def _sum(shares: Iterable[Rate]) -> Rate:
    requests = total = 0.0
    for share in shares:
        requests, total = requests + share.requests, total + share.bytes
    return Rate(requests, total)


class Pace:
    """How much a process asked for lately, and when it may ask again; its share times a factor that refusals halve.

    The factor rises by ``FACTOR_STEP`` in each ``RAISED_EVERY_S`` without a refusal (additive increase, multiplicative
    decrease: Chiu and Jain, 1989).
    """

    def __init__(self) -> None:
        self._asked: deque[tuple[float, int]] = deque()
        """When requests were sent, and the bytes of each."""
        self._bytes = 0
        self.factor = 1.0
        self._changed_s = float("-inf")

    def refused(self, now_s: float) -> None:
        """Halve what is asked for: the server refused a request."""
        if now_s - self._changed_s >= HALVED_EVERY_S or self.factor == 1.0:
            self.factor, self._changed_s = max(FACTOR_MIN, self.factor / 2.0), now_s

    def largest(self, share: Rate) -> int:
        """Return the most bytes that one request may ask for; 0: none may be sent."""
        return int(share.bytes * self.factor)

    def wait_s(self, share: Rate, size_bytes: int, *, now_s: float) -> float:
        """Return how long to wait until a request may be sent; 0: now.

        Args:
            share: Of the process.
            size_bytes: What the request asks for.
            now_s: A clock that never jumps.
        """
        self._forget(now_s)
        allowed = share * self.factor
        if allowed.requests < 1.0 or size_bytes > allowed.bytes:
            return WINDOW_S
        requests, taken = len(self._asked), self._bytes
        wait_s = 0.0
        for sent_s, size in self._asked:
            if requests + 1 <= allowed.requests and taken + size_bytes <= allowed.bytes:
                break
            requests, taken, wait_s = requests - 1, taken - size, sent_s + WINDOW_S - now_s
        return max(0.0, wait_s)

    def sent(self, size_bytes: int, *, now_s: float) -> None:
        """Note a request."""
        self._asked.append((now_s, size_bytes))
        self._bytes += size_bytes

    def _forget(self, now_s: float) -> None:
        while self._asked and self._asked[0][0] + WINDOW_S <= now_s:
            self._bytes -= self._asked.popleft()[1]
        if self.factor < 1.0 and now_s - self._changed_s >= RAISED_EVERY_S:
            self.factor, self._changed_s = min(1.0, self.factor + FACTOR_STEP), now_s
