"""What is left of the quotas: charged and released by one round of decisions, job by job.

At each queue, ``taken`` is what its own jobs take and what its children take beyond what they keep to themselves. A
queue's taken pieces lie first in what it keeps, then in what it shares with its parent's subtree, and last in what it
borrows there. A charge within what a queue keeps concerns nobody else; only what exceeds it goes on to the parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.inventory import Requests


class QuotaLedger:
    """Pieces charged to each queue, and what more each may take."""

    def __init__(self, tree: QueueTree, used: Mapping[tuple[str, str], int]) -> None:
        self._tree = tree
        self._own: dict[tuple[str, str], int] = defaultdict(int)
        self._taken: dict[tuple[str, str], int] = defaultdict(int)
        for (queue, resource), count in used.items():
            self._add(queue, resource, count)

    def copy(self) -> QuotaLedger:
        """Return a ledger on which to try things out."""
        twin = QuotaLedger(self._tree, {})
        twin._own = self._own.copy()
        twin._taken = self._taken.copy()
        return twin

    def used(self, queue: str, resource: str) -> int:
        """Return the pieces that the queue's own jobs hold, those of its children aside."""
        return self._own.get((queue, resource), 0)

    def room(self, queue: str, resource: str) -> int | None:
        """Return how many more pieces the queue may take; None: any number. Nothing for a queue not in order."""
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
        """Tell whether the queue may take this much more, of every resource."""
        for resource, amount in requests:
            room = self.room(queue, resource)
            if room is not None and amount * workers > room:
                return False
        return self._tree.in_order(queue)

    def charge(self, queue: str, requests: Requests, workers: int) -> None:
        """Take, whether it fits or not: what runs is counted even if a quota was lowered beneath it."""
        for resource, amount in requests:
            self._add(queue, resource, amount * workers)

    def release(self, queue: str, requests: Requests, workers: int) -> None:
        """Give back."""
        for resource, amount in requests:
            self._add(queue, resource, -amount * workers)

    def over(self, queue: str, resource: str) -> int:
        """Return by how much the queue's subtree exceeds its quota; less than 0 where it has some left."""
        return self._taken.get((queue, resource), 0) - self._tree.bound(queue, resource).quota

    def over_own(self, queue: str, resource: str) -> int:
        """Return by how much the queue's own jobs exceed its own quota, its children aside."""
        return self.used(queue, resource) - self._tree.bound(queue, resource).nominal

    def borrowed(self, queue: str, resource: str) -> int:
        """Return how many pieces of other queues' quota the queue's subtree holds."""
        return max(0, self.over(queue, resource)) if resource in self._tree.limited(queue) else 0

    def _add(self, queue: str, resource: str, count: int) -> None:
        """Book at the queue, and at each cohort above what goes beyond the part kept below it."""
        self._own[queue, resource] += count
        for place, bound in self._tree.bound_path(queue, resource):
            if not count:
                return
            before = self._taken[place]
            self._taken[place] = before + count
            count = max(0, before + count - bound.kept) - max(0, before - bound.kept)
