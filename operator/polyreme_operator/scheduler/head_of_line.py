"""Reservations for the head of each queue: its first job that does not fit yet.

Later jobs must not use what is reserved, unless they may backfill it without delaying the head (``backfill.py``). Quota
is reserved within the queue tree of the head, nodes in the whole cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.scheduler.backfill import hold_for, may_fill
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.scheduler.preemption.victims import all_running, running_of
from polyreme_operator.types.inventory import BoolArray
from polyreme_operator.types.queues import Waiting
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import Pending


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    head: Waiting
    number: int
    """Position in the order in which heads were found."""
    rows_N: BoolArray | None
    """None: only quota is reserved."""
    ready_at_s: float | None


class HeadReservations:
    """Reservations of all heads, in the order in which they were found."""

    def __init__(self, cycle: SchedulingCycle) -> None:
        self._cycle = cycle
        self._quotas: dict[str, list[_Held]] = {}
        """By root of the head's tree: its quota does not concern other trees."""
        self._nodes: list[_Held] = []
        """Those that reserve nodes too."""
        self._seen: set[str] = set()
        self._with_nodes = 0

    def __contains__(self, queue: str) -> bool:
        """Tell whether a job of this queue has been refused before."""
        return queue in self._seen

    def add(self, waiting: Waiting, why: Pending) -> None:
        """Note that a job does not fit; if it is the first one of its queue, reserve what it waits for.

        A job that can never fit reserves nothing: the next job becomes the head.
        """
        if waiting.queue in self._seen or why.permanent:
            return
        self._seen.add(waiting.queue)
        held = self._hold(waiting, why)
        if held is not None:
            self._quotas.setdefault(self._root(waiting), []).append(held)
            if held.rows_N is not None:
                self._nodes.append(held)
            if waiting.uid not in self._cycle.reservations:
                # Otherwise its reservation as a preemptor has charged the quota already.
                self._cycle.quotas.charge(waiting.queue, waiting.requests, waiting.workers)

    @contextlib.contextmanager
    def beside(self, waiting: Waiting) -> Iterator[tuple[BoolArray | None, list[Waiting]]]:
        """While this lasts, reservations that this job may not backfill count as used.

        Yields:
            The nodes that the job must not use, and the heads that reserve them.
        """
        rows_N: BoolArray | None = None
        before: list[Waiting] = []
        filled: list[Waiting] = []
        for held in self._concerning(waiting):
            if self._fills(waiting, held):
                filled.append(held.head)
                continue
            before.append(held.head)
            if held.rows_N is not None:
                rows_N = held.rows_N if rows_N is None else rows_N | held.rows_N
        with self.without(filled):
            yield rows_N, before

    @contextlib.contextmanager
    def without(self, heads: Sequence[Waiting]) -> Iterator[None]:
        """While this lasts, no quota is reserved for these."""
        quotas = self._cycle.quotas
        for head in heads:
            quotas.release(head.queue, head.requests, head.workers)
        yield
        for head in heads:
            quotas.charge(head.queue, head.requests, head.workers)

    def none(self, waiting: Waiting) -> contextlib.AbstractContextManager[None]:
        """While this lasts, no quota that a job could use is reserved for any head."""
        return self.without([held.head for held in self._quotas.get(self._root(waiting), ())])

    def _concerning(self, waiting: Waiting) -> list[_Held]:
        root = self._root(waiting)
        other_trees = [held for held in self._nodes if self._root(held.head) != root]
        concerning = [held for held in (*self._quotas.get(root, ()), *other_trees) if held.head.uid != waiting.uid]
        return sorted(concerning, key=lambda held: held.number) if other_trees else concerning

    def _root(self, waiting: Waiting) -> str:
        return self._cycle.cluster.tree.root(waiting.queue)

    def _fills(self, waiting: Waiting, held: _Held) -> bool:
        return may_fill(
            waiting,
            head=held.head,
            head_ready_at_s=held.ready_at_s,
            tree=self._cycle.cluster.tree,
            ledger=self._cycle.quotas,
            now_s=self._cycle.now_s,
        )

    def _hold(self, waiting: Waiting, why: Pending) -> _Held | None:
        cycle = self._cycle
        if why.reason == Reason.EXCEEDS_QUOTA and waiting.uid not in cycle.reservations:
            # It needs quota first, so no nodes are reserved; a preemptor however starts on the nodes of its victims.
            ever = QuotaLedger(cycle.cluster.tree, {}).fits(waiting.queue, waiting.requests, waiting.workers)
            return _Held(head=waiting, number=len(self._seen), rows_N=None, ready_at_s=None) if ever else None
        if why.reason == Reason.MISCONFIGURED or self._with_nodes >= cycle.limits.reserved_heads_max:
            return None
        self._with_nodes += 1
        job = cycle.cluster.jobs[waiting.uid]
        running, quotas = all_running(cycle), cycle.quotas
        reserved = cycle.reservations.get(waiting.uid)
        if reserved is not None and job.spec is not None:
            # Victims of this cycle stop too; the head needs the rest of its nodes when they are gone.
            asked = (running_of(cycle.inventory, cycle.cluster.jobs[uid]) for uid in reserved.stopping)
            here = {each.uid for each in running}
            running += [dataclasses.replace(each, stopping=True) for each in asked if each and each.uid not in here]
            quotas = quotas.copy()
            quotas.release(job.spec.queue_name, job.requests, job.replicas)
        found = hold_for(
            cycle.inventory,
            gang_of(job, waiting.workers),
            waiting,
            running,
            ledger=quotas,
            now_s=cycle.now_s,
            blocked_N=cycle.blocked_for(job),
        )
        if found is None:
            return None
        return _Held(head=waiting, number=len(self._seen), rows_N=found.rows_N, ready_at_s=found.ready_at_s)
