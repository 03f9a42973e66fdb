"""Which source each slot takes, by integer weights: every prefix holds each source's share within one sample.

Slots are jobs of periodic tasks on one machine, taken by earliest deadline (Pfair: S. Baruah, N. Cohen, G. Plaxton,
D. Varvel, "Proportionate progress", 1996): source i's sample j may not come before slot floor(j W / w) nor after slot
ceil((j + 1) W / w) - 1, so no count ever differs from its share by one or more. All is integer arithmetic over one
tabulated period.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api.job.schedule import PERIOD_MAX
from polyreme_datahub.errors import SourceInvalidError


def shares_of(weights: Sequence[int]) -> list[int]:
    """Return the slots of each source in one period.

    Raises:
        SourceInvalidError: If there is no weight, or the period is too long.
    """
    divisor = math.gcd(*weights)
    if divisor == 0:
        raise SourceInvalidError("every weight of the mixture is 0; raise one", field="data.sources")
    shares = [weight // divisor for weight in weights]
    if (period := sum(shares)) > PERIOD_MAX:
        raise SourceInvalidError(
            f"mixture weights repeat only after {period} samples, expected at most {PERIOD_MAX}; use smaller "
            "or rounder weights",
            field="data.sources",
        )
    return shares


class Mixture:
    """The sources of slots 0, 1, 2, ... under fixed weights."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._shares = shares_of(weights)
        self.period = sum(self._shares)
        self._source_N = _tabulate(self._shares, self.period)

    def share(self, source: int) -> float:
        """Return a source's share of the slots."""
        return self._shares[source] / self.period

    def slot_of(self, source: int, turn: int) -> int:
        """Return the slot of a source's turn; both count from 0, and the source has a weight."""
        rounds, rest = divmod(turn, self._shares[source])
        return rounds * self.period + int(np.flatnonzero(self._source_N == source)[rest])

    def sources(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the source of each of ``count`` slots from ``first`` on."""
        return self._source_N[(first + np.arange(count)) % self.period].astype(np.int64)

    def taken(self, slots: int) -> list[int]:
        """Return how many of the first ``slots`` slots each source has."""
        rounds, rest = divmod(slots, self.period)
        # Counted once a window, some milliseconds: a table of every prefix would grow with sources times period.
        before_K = np.bincount(self._source_N[:rest], minlength=len(self._shares))
        return [rounds * share + int(before) for share, before in zip(self._shares, before_K, strict=True)]


def _tabulate(shares: Sequence[int], period: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    waiting = [(0, source) for source, share in enumerate(shares) if share]
    eligible: list[tuple[int, int]] = []
    taken = [0] * len(shares)
    table = np.empty(period, dtype=np.min_scalar_type(len(shares)))
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source = heapq.heappop(waiting)
            heapq.heappush(eligible, (-(-(taken[source] + 1) * period // shares[source]), source))
        _, source = heapq.heappop(eligible)
        table[slot] = source
        taken[source] += 1
        if taken[source] < shares[source]:
            heapq.heappush(waiting, (taken[source] * period // shares[source], source))
    return table
