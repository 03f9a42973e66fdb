"""Quota ledger, to which a scheduling cycle charges and releases jobs.

At each queue, ``taken`` is the usage of its own jobs plus the usage of its children beyond the quota that those keep
to themselves. Usage first fills the quota that a queue keeps, then the quota that it lends, then the quota that it
borrows. A charge within the kept quota affects no other queue; only the excess is charged to the parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.inventory import Requests


class QuotaLedger:
    """Amounts charged to each queue, and the room that is left."""

    def __init__(self, tree: QueueTree, used: Mapping[tuple[str, str], int]) -> None:
        self._tree = tree
        self._own: dict[tuple[str, str], int] = defaultdict(int)
        self._taken: dict[tuple[str, str], int] = defaultdict(int)
        for (queue, resource), count in used.items():
            self._add(queue, resource, count)

    def copy(self) -> QuotaLedger:
        """Return an independent copy."""
        twin = QuotaLedger(self._tree, {})
        twin._own = self._own.copy()
        twin._taken = self._taken.copy()
        return twin

    def used(self, queue: str, resource: str) -> int:
        """Return the usage of the queue's own jobs, without its children."""
        return self._own.get((queue, resource), 0)

    def room(self, queue: str, resource: str) -> int | None:
        """Return how much more the queue may use; None without a limit, 0 for an invalid queue."""
        path = self._tree.bound_path(queue, resource)
        if not path:
            return None if self._tree.in_order(queue) else 0
        room: int | None = None
        for place, bound in reversed(path):
            taken = self._taken.get(place, 0)
            if room is None:
                room = max(0, bound.quota - taken)
                continue
            if bound.borrowing_limit is not None:
                room = min(room, max(0, bound.quota + bound.borrowing_limit - max(taken, bound.kept)))
            room += max(0, bound.kept - taken)
        return room

    def fits(self, queue: str, requests: Requests, workers: int) -> bool:
        """Tell whether the queue may use this much more of every resource."""
        for resource, amount in requests:
            room = self.room(queue, resource)
            if room is not None and amount * workers > room:
                return False
        return self._tree.in_order(queue)

    def charge(self, queue: str, requests: Requests, workers: int) -> None:
        """Charge usage even if it does not fit: running jobs count after their quota was lowered."""
        for resource, amount in requests:
            self._add(queue, resource, amount * workers)

    def release(self, queue: str, requests: Requests, workers: int) -> None:
        """Release usage."""
        for resource, amount in requests:
            self._add(queue, resource, -amount * workers)

    def over(self, queue: str, resource: str) -> int:
        """Return by how much the queue's subtree exceeds its quota; negative if some is left."""
        return self._taken.get((queue, resource), 0) - self._tree.bound(queue, resource).quota

    def over_own(self, queue: str, resource: str) -> int:
        """Return by how much the queue's own jobs exceed its own quota, without its children."""
        return self.used(queue, resource) - self._tree.bound(queue, resource).nominal

    def borrowed(self, queue: str, resource: str) -> int:
        """Return how much quota of other queues the queue's subtree uses. A root over its own quota borrows none."""
        if len(self._tree.path(queue)) < 2:
            return 0
        return max(0, self.over(queue, resource)) if resource in self._tree.limited(queue) else 0

    def _add(self, queue: str, resource: str, count: int) -> None:
        """Charge the queue, and each cohort above it with the excess over the quota kept below."""
        self._own[queue, resource] += count
        for place, bound in self._tree.bound_path(queue, resource):
            if not count:
                return
            before = self._taken[place]
            self._taken[place] = before + count
            count = max(0, before + count - bound.kept) - max(0, before - bound.kept)
