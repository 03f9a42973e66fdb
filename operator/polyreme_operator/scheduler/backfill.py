"""Backfill: which jobs may use the capacity that is reserved for a blocked head of the queue without delaying it.

When the first job of a queue does not fit, the nodes and the quota that it waits for are reserved for it. Later jobs
may use them only if they are gone by the time the head can start: because they end before, or because the head may
preempt them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from polyreme_operator.placement.domains import rooms_of
from polyreme_operator.placement.eligible import slots_N
from polyreme_operator.placement.place import charge, place
from polyreme_operator.placement.topology_request import topology_request_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler.preemption.policy import QuotaTrial, may_displace, min_runtime_s, protected_until_s
from polyreme_operator.types.inventory import BoolArray, GangRequest, Inventory, Placed, Unschedulable
from polyreme_operator.types.queues import Running, Waiting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Nodes reserved for the head of a queue that does not fit yet.

    Its quota is reserved too: other jobs must fit a ledger to which the head is already charged.
    """

    rows_N: BoolArray
    """Nodes that other jobs must not use unless they may backfill."""
    ready_at_s: float | None
    """The head's earliest start; None if it is unknown."""


def may_fill(
    filler: Waiting,
    *,
    head: Waiting,
    head_ready_at_s: float | None,
    tree: QueueTree,
    ledger: QuotaLedger,
    now_s: float,
) -> bool:
    """Tell whether a job may use what is reserved for the head.

    Args:
        filler: The later job.
        head: The job for which nodes and quota are reserved.
        head_ready_at_s: The head's earliest start, from the ends of running jobs; None if it is unknown.
        tree: The queues.
        ledger: Their quotas, with the head charged and without the filler; left as it is.
        now_s: The present.
    """
    if not tree.view(head.queue).backfill:
        return False
    ends_within_s = math.inf if filler.ends_within_s is None else filler.ends_within_s
    if head_ready_at_s is not None and now_s + ends_within_s <= head_ready_at_s:
        return True
    if not (filler.preemptible and may_displace(head, filler.queue, filler.priority, tree)):
        return False
    view = tree.view(filler.queue)
    if head_ready_at_s is None:
        # The cooldown alone is a negligible delay when the head's start is unknown.
        yields_in_time = min_runtime_s(filler, view) <= 0
    else:
        yields_in_time = protected_until_s(filler, view, admitted_s=now_s) <= head_ready_at_s
    if not yields_in_time:
        return False
    if filler.queue == head.queue:
        return True
    ledger.charge(filler.queue, filler.requests, filler.workers)
    yields = QuotaTrial.on(tree, ledger, head).may_take(filler.queue)
    ledger.release(filler.queue, filler.requests, filler.workers)
    return yields


def hold_for(
    inventory: Inventory,
    request: GangRequest,
    head: Waiting,
    running: Sequence[Running],
    *,
    ledger: QuotaLedger,
    now_s: float,
    blocked_N: BoolArray | None = None,
) -> Hold | None:
    """Return what to reserve for the head of a queue that does not fit; None if no nodes could ever hold it.

    Running jobs are assumed to last until their deadlines, jobs without a deadline forever, and jobs that already stop
    not at all. The start is found by bisection: what fits after some jobs have ended fits after more have.

    Args:
        inventory: The nodes; what is taken of them includes all of ``running``.
        request: What the head needs of them.
        head: The same as the queue sees it.
        running: All jobs that hold devices.
        ledger: The quotas, with all of ``running`` charged; left as it is.
        now_s: The present.
        blocked_N: Nodes that the head may not use.
    """
    future = _Future(inventory, request, head, ledger, blocked_N)
    leaving = [job for job in running if job.stopping]
    lasting = [(job.ends_at_s, job.uid, job) for job in running if job.ends_at_s is not None and not job.stopping]
    lasting.sort(key=lambda end: end[:2])
    ending = [job for _, _, job in lasting]
    found: Placed | None = None
    low, high = 0, len(ending) + 1
    while low < high:
        middle = (low + high) // 2
        placed = future.place([*leaving, *ending[:middle]]) if middle <= len(ending) else None
        if placed is None and middle <= len(ending):
            low = middle + 1
        else:
            high, found = middle, placed
    if found is not None:
        held_N = np.zeros(len(inventory.names), dtype=np.bool_)
        held_N[found.rows_W] = True
        return Hold(rows_N=held_N, ready_at_s=max([now_s, *(end_s for end_s, _, _ in lasting[:low])]))
    if future.place(running) is None:
        return None
    return Hold(rows_N=future.nearest_N(leaving), ready_at_s=None)


class _Future:
    """The cluster without some of its jobs."""

    def __init__(
        self,
        inventory: Inventory,
        request: GangRequest,
        head: Waiting,
        ledger: QuotaLedger,
        blocked_N: BoolArray | None,
    ) -> None:
        self._inventory = inventory
        self._request = request
        self._head = head
        self._ledger = ledger
        self._blocked_N = blocked_N

    def place(self, gone: Sequence[Running]) -> Placed | None:
        """Return where the head would be placed, if the quota permits."""
        books = self._ledger.copy()
        for job in gone:
            books.release(job.queue, job.requests, len(job.rows_W))
        if not books.fits(self._head.queue, self._head.requests, self._head.workers):
            return None
        # The order of ranks does not matter yet.
        placed = place(self._without(gone), self._request, blocked_N=self._blocked_N, work_units=0)
        return placed if isinstance(placed, Placed) else None

    def nearest_N(self, gone: Sequence[Running]) -> BoolArray:
        """Return the nodes with room in the domain that has the most; of all domains if no level is required."""
        inventory = self._without(gone)
        tree = tree_of(inventory)
        requested = topology_request_of(inventory, tree, self._request)
        free_N = slots_N(inventory, self._request, blocked_N=self._blocked_N)
        held_N: BoolArray = free_N > 0
        if isinstance(requested, Unschedulable) or requested.required is None:
            return held_N
        room_D = rooms_of(tree, requested, free_N).by_depth[requested.required]
        held_N &= tree.domain_LN[requested.required] == int(room_D.argmax())
        return held_N

    def _without(self, gone: Sequence[Running]) -> Inventory:
        before = self._inventory
        inventory = dataclasses.replace(before, used_NR=before.used_NR.copy(), busy_N=before.busy_N.copy())
        for job in gone:
            charge(inventory, dataclasses.replace(self._request, requests=job.requests), job.rows_W, sign=-1)
        return inventory
