"""Rules of a job's budget at its bucket: how many requests and bytes a second each process of it may ask for.

The budget is divided by a table of leases, which the processes replace one after another by create-if-absent (each
generation is an object of its own). A process that renews its lease takes a fair share, as far as the others leave it:
no process loses its share to another, it gives up what is more than fair when it renews. So the shares of all leases
that may be in use never exceed the budget, whatever joins, dies, or is slow. A process stops asking ``SKEW_S`` before
its lease ends by its own clock, and others count it until ``SKEW_S`` after that by theirs: clocks may differ by as much
as that to either side. The successor of a dead process has its holder's name, and takes its lease at once. Pure:
times are arguments.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

SKEW_S = 5.0
"""Most by which the clock of a machine may be wrong, to either side."""
RENEWED_EVERY_S, HOLDER_S = 4.0, 0.1
"""Time after which a lease is renewed: at least the first, and the second for each holder, so that many don't meet."""
RENEWALS = 4
"""A lease lasts for so many times of its renewal."""
GROWN_AFTER_S = 2.0
"""Time after which a process uses what others gave up: they may have asked for it a moment before."""
WINDOW_S = 1.05
"""Time for which a request counts after its answer: a little longer than the second that the budget speaks of."""
POLL_S = 0.02
"""Time after which a request is considered again that waits for the answers to others."""
HOLDERS_MAX = 4096
"""Leases of one job; a process that finds so many waits."""
RENEWAL_REQUESTS, RENEWAL_BYTES = 4, 1 << 16
"""What is left free of each share in each second, for renewing the lease."""
HEADER_BYTES = 1024
"""What an answer has beside the bytes that were asked for."""
FACTOR_MIN = 1 / 64
"""Least part of its share that a process asks for, however often it is refused."""
PIECE_MIN_BYTES = 1 << 16
"""A request may ask for so much, if its process' share has as much, however often it is refused."""
PIECES = 4
"""A request asks for at most this part of a second's bytes, so that there can be several at once."""
FACTOR_STEP = 0.05
RAISED_EVERY_S = 1.0
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

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.requests + other.requests, self.bytes + other.bytes)

    def least(self, other: Rate) -> Rate:
        """Return the lesser of each, and at least nothing."""
        return Rate(max(0.0, min(self.requests, other.requests)), max(0.0, min(self.bytes, other.bytes)))

    def most(self, other: Rate) -> Rate:
        """Return the larger of each."""
        return Rate(max(self.requests, other.requests), max(self.bytes, other.bytes))

    def exceeds(self, other: Rate) -> bool:
        """Tell whether it has more of anything."""
        return self.requests > other.requests or self.bytes > other.bytes


NOTHING = Rate(0.0, 0.0)
RENEWAL = Rate(RENEWAL_REQUESTS, RENEWAL_BYTES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The share of one process."""

    holder: str
    """Name of the process, and of those that take its place."""
    process: str
    """Which of those it is."""
    wanted: Rate
    """Share that it would have if all had what they want."""
    share: Rate
    until_s: float
    """When it ends, by the clock of its writer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One generation of a job's leases."""

    generation: int = 0
    leases: tuple[Lease, ...] = ()
    shrunk_s: float = 0.0
    """When something was last given up or taken from a dead process, by the clock of its writer."""

    @property
    def renewed_every_s(self) -> float:
        """Return after which time each holder renews its lease."""
        return max(RENEWED_EVERY_S, HOLDER_S * len(self.leases))

    def of(self, holder: str) -> Lease | None:
        """Return the lease of a holder."""
        return next((lease for lease in self.leases if lease.holder == holder), None)


def renewed(table: Table, holder: str, *, process: str, budget: Rate, wanted: Rate, now_s: float) -> Table | None:
    """Return the next generation, in which a process has a new lease; None: there are too many holders.

    Args:
        table: The newest generation.
        holder: Name of the process; whatever process held its lease is dead.
        process: Which one it is.
        budget: Of the job.
        wanted: What the process wants of it; where all want too much, all have the same part of what they want.
        now_s: The time by the process' clock.
    """
    before = table.of(holder)
    others = tuple(each for each in table.leases if each.holder != holder and each.until_s + SKEW_S > now_s)
    if len(others) >= HOLDERS_MAX:
        return None
    left = budget - _sum(each.share for each in others)
    all_wanted = _sum(each.wanted for each in others) + wanted
    fair = Rate(
        wanted.requests * min(1.0, budget.requests / all_wanted.requests),
        wanted.bytes * min(1.0, budget.bytes / all_wanted.bytes),
    )
    until_s = now_s + SKEW_S + RENEWALS * max(RENEWED_EVERY_S, HOLDER_S * (len(others) + 1))
    mine = Lease(holder=holder, process=process, wanted=wanted, share=fair.least(left), until_s=until_s)
    shrunk = before is not None and (before.process != process or before.share.exceeds(mine.share))
    return Table(generation=table.generation + 1, leases=(*others, mine), shrunk_s=now_s if shrunk else table.shrunk_s)


def grows_late(table: Table, *, now_s: float) -> bool:
    """Tell whether what a process gets more by this generation may have been another's a moment ago."""
    return now_s - table.shrunk_s < GROWN_AFTER_S + 2 * SKEW_S


def usable(lease: Lease | None, *, now_s: float) -> Rate:
    """Return what a process may ask for by its lease, beside renewing it."""
    if lease is None or now_s >= lease.until_s - SKEW_S:
        return NOTHING
    return (lease.share - RENEWAL).least(lease.share)


def _sum(rates: Iterable[Rate]) -> Rate:
    return sum(rates, start=NOTHING)


class Pace:
    """What a process asked for lately, and when it may ask again: its share times a factor that refusals halve.

    A request counts from when it is sent until ``WINDOW_S`` after its answer, so whenever in that time its bytes pass
    the server, no second has more than the share. The factor rises by ``FACTOR_STEP`` in each ``RAISED_EVERY_S``
    without a refusal (additive increase, multiplicative decrease: Chiu and Jain, 1989).
    """

    def __init__(self) -> None:
        self._under_way: dict[int, int] = {}
        self._answered: deque[tuple[float, int]] = deque()
        self._bytes = self._serial = 0
        self.factor = 1.0
        self._changed_s = float("-inf")

    def refused(self, now_s: float) -> None:
        """Halve what is asked for: the server refused a request."""
        if now_s - self._changed_s >= HALVED_EVERY_S or self.factor == 1.0:
            self.factor, self._changed_s = max(FACTOR_MIN, self.factor / 2.0), now_s

    def largest(self, share: Rate) -> int:
        """Return the most bytes that one request may ask for; 0: none may be sent."""
        allowed = self._allowed(share).bytes - HEADER_BYTES
        return max(0, int(max(min(allowed, PIECE_MIN_BYTES), allowed / PIECES)))

    def wait_s(self, share: Rate, size_bytes: int, *, now_s: float) -> float:
        """Return how long to wait until a request may be sent; 0: now.

        Args:
            share: Of the process.
            size_bytes: What the request asks for.
            now_s: A clock that never jumps.
        """
        self._forget(now_s)
        allowed, size_bytes = self._allowed(share), size_bytes + HEADER_BYTES
        if allowed.requests < 1.0 or size_bytes > allowed.bytes:
            return WINDOW_S
        requests, taken, wait_s = len(self._under_way) + len(self._answered), self._bytes, 0.0
        for answered_s, size in self._answered:
            if requests + 1 <= allowed.requests and taken + size_bytes <= allowed.bytes:
                break
            requests, taken, wait_s = requests - 1, taken - size, answered_s + WINDOW_S - now_s
        fits = requests + 1 <= allowed.requests and taken + size_bytes <= allowed.bytes
        return max(0.0, wait_s) if fits else max(POLL_S, wait_s)

    def begin(self, size_bytes: int) -> int:
        """Note a request that is sent; return its number."""
        self._serial += 1
        self._under_way[self._serial] = size_bytes + HEADER_BYTES
        self._bytes += size_bytes + HEADER_BYTES
        return self._serial

    def end(self, number: int, *, now_s: float) -> None:
        """Note the answer to a request, or that it was given up."""
        self._answered.append((now_s, self._under_way.pop(number)))

    def _allowed(self, share: Rate) -> Rate:
        slowed = share * self.factor
        requests = max(min(1.0, share.requests), slowed.requests)
        return Rate(requests, max(min(PIECE_MIN_BYTES + HEADER_BYTES, share.bytes), slowed.bytes))

    def _forget(self, now_s: float) -> None:
        while self._answered and self._answered[0][0] + WINDOW_S <= now_s:
            self._bytes -= self._answered.popleft()[1]
        if self.factor < 1.0 and now_s - self._changed_s >= RAISED_EVERY_S:
            self.factor, self._changed_s = min(1.0, self.factor + FACTOR_STEP), now_s
