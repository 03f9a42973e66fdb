"""Right of an attempt to train on, by signs that no newer one has begun; pure, and checked by simulated failovers.

A newer attempt claims its resume point in the checkpoint root before its ranks are released, and its leader writes the
job's Lease. So a look at the root that finds no claim, or a write of the Lease that succeeds, shows that at its
*beginning* no newer attempt trained. For ``TTL_S`` after that beginning the ranks may begin steps.

One of the two signs is enough: a gang trains on while the API server is away, or while the store is. A gang that is cut
off from both stops after ``TTL_S``; it could neither save nor be seen (leases: Gray and Cheriton, SOSP 1989).
"""

from __future__ import annotations

import dataclasses

LOOK_EVERY_S = 10.0
"""How often the leader looks at the checkpoint root."""
TTL_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingLease:
    """The right of one attempt to train."""

    attempt: int
    confirmed_s: float
    """Beginning of the newest request that showed no newer attempt, on a clock that runs while the machine sleeps."""

    def confirmed(self, began_s: float) -> TrainingLease:
        """Return the lease after a request that began then and showed no newer attempt."""
        return dataclasses.replace(self, confirmed_s=max(self.confirmed_s, began_s))

    @property
    def until_s(self) -> float:
        """Time until which steps may begin."""
        return self.confirmed_s + TTL_S
