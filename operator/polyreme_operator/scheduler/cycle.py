"""One round: settle the intents of an earlier batch; give workers of lost nodes another place; drain; resize; admit.

A gang is placed whole or not at all. What a round decides is charged to its own copies of inventory and quotas, so that
nothing is given away twice; it is written as intents before any job is touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.placement.place import charge, place
from polyreme_operator.queueing.fair_share import Shares
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.reconcile import transition
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.scheduler.limits import Limits
from polyreme_operator.scheduler.reservations import Reservation, domain_rows, exclusive_domains
from polyreme_operator.scheduler.snapshot import ClusterSnapshot
from polyreme_operator.types.actions import WriteIntents, WriteStatus
from polyreme_operator.types.intents import Intent, IntentState, intent_state, next_attempt
from polyreme_operator.types.inventory import BoolArray, GangRequest, RowArray, Unschedulable
from polyreme_operator.types.snapshot import JobSnapshot, Pending
from polyreme_operator.types.views import JobView, PodView
from polyreme_planner.plan import Plan

LEAVES_WITHIN_S = 60.0
"""How long beyond its grace a pod's end is waited for. One that takes longer is stuck: who waited looks elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One round of decisions. ``intents`` is written before ``writes``; each of ``writes`` stands by itself."""

    intents: WriteIntents | None = None
    writes: tuple[WriteStatus, ...] = ()
    pending: Mapping[str, Pending] = dataclasses.field(default_factory=dict)
    """Why a job waits for reasons of its own, by UID."""
    kinds: Mapping[int, Pending] = dataclasses.field(default_factory=dict)
    """Why all jobs of a class wait."""
    unsure: frozenset[int] = frozenset()
    """Those of these classes that are to be looked at again though nothing comes free."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a running job keeps its size though its spec says another, by UID."""
    reads: frozenset[str] = frozenset()
    """UIDs of jobs whose Lease must be read before their attempt may be ended; then decide again."""
    again: bool = False
    """Whether the round met one of its bounds: there is more to decide now."""
    wake_at_s: float | None = None
    """When time alone may change what was decided."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stopwatch:
    """Measures each search for a place, for people to see; nothing is decided by it."""

    now_s: Callable[[], float]
    spent_s: list[float]


def schedule(
    cluster: ClusterSnapshot, now_s: float, *, limits: Limits | None = None, stopwatch: Stopwatch | None = None
) -> Batch:
    """Decide admissions, moves and resizes for the cluster as it is."""
    # Rooms of their own, which all work on a round; they know it, so it can't know them when it is loaded.
    from polyreme_operator.scheduler.admit import admit_waiting
    from polyreme_operator.scheduler.drain import drain
    from polyreme_operator.scheduler.repair import repair
    from polyreme_operator.scheduler.resize import grow, resize

    entries = [entry for entry in cluster.intents.entries if entry.uid not in cluster.settled]
    open_ = [entry for entry in entries if intent_state(entry, cluster.jobs) is IntentState.OPEN]
    limits = limits or Limits()
    if open_:
        some = open_[: limits.admissions_max]
        return Batch(writes=tuple(_cancel(cluster.jobs[entry.uid]) for entry in some), again=True)
    work = SchedulingCycle(cluster, now_s, limits, stopwatch)
    repair(work)
    drain(work)
    resize(work)
    admit_waiting(work)
    grow(work)
    return work.batch()


class SchedulingCycle:
    """The capacity that is left, and what this round has decided so far."""

    def __init__(self, cluster: ClusterSnapshot, now_s: float, limits: Limits, stopwatch: Stopwatch | None) -> None:
        self.cluster = cluster
        self.now_s = now_s
        self.limits = limits
        self.inventory = cluster.inventory
        self.quotas = QuotaLedger(cluster.tree, cluster.used)
        self.pending: dict[str, Pending] = {}
        self.kinds: dict[int, Pending] = {}
        self.refused: dict[str, str] = {}
        self.changed: set[str] = set()
        self.exclusive = exclusive_domains(cluster.inventory, cluster.jobs, cluster.exclusive)
        self.reservations: dict[str, Reservation] = {}
        """What is held for jobs that others make way for, by UID of the former."""
        self.again = False
        self.unsure: set[int] = set()
        """Refused classes of which the round has not tried everything."""
        self._spent_nodes = 0
        self._stopwatch = stopwatch
        self._entries: list[Intent] = []
        self._writes: list[WriteStatus] = []
        self._reads: set[str] = set()
        self._wake_at_s: float | None = None

    def batch(self) -> Batch:
        """Return what was decided."""
        entries = tuple(self._entries)
        version = self.cluster.intents.resource_version
        # A missing object is created at once, also empty: a successor that finds none has to cancel every job.
        lost = version is None and bool(self.cluster.intents.entries)
        return Batch(
            intents=WriteIntents(resource_version=version, entries=entries) if entries or lost else None,
            writes=tuple(self._writes),
            pending=self.pending,
            kinds=self.kinds,
            unsure=frozenset(self.unsure),
            refused=self.refused,
            reads=frozenset(self._reads),
            again=self.again,
            wake_at_s=self._wake_at_s,
        )

    @property
    def full(self) -> bool:
        """Whether the round may decide nothing more that takes capacity."""
        return len(self._entries) >= self.limits.admissions_max or self._spent_nodes >= self.limits.placement_nodes_max

    def shares(self) -> Shares:
        """Return the queues' shares at the start of the round."""
        inventory = self.inventory
        whole = inventory.capacity_NR.sum(axis=0, dtype=np.float64)
        capacity = {resource: int(whole[at]) for at, resource in enumerate(inventory.resources)}
        return Shares(self.cluster.tree, self.cluster.used, capacity, self.now_s)

    def snapshot(self, job: JobView) -> JobSnapshot:
        """Return what judges a running job."""
        pods = self.cluster.pods.get(job.uid, {})
        return JobSnapshot(
            job=job, pods=tuple(pods.values()), nodes=self.cluster.nodes, lease=self.cluster.leases.get(job.uid)
        )

    def must_read(self, job: JobView) -> bool:
        """Ask for the Lease first: the success of an attempt that is about to be ended may stand there unseen."""
        if job.uid in self.cluster.leases_read or job.uid not in self.cluster.leases:
            return False
        self._reads.add(job.uid)
        return True

    def wake_at(self, at_s: float) -> None:
        """Look again at this time, whether anything happens before or not."""
        self._wake_at_s = at_s if self._wake_at_s is None else min(self._wake_at_s, at_s)

    def place(
        self,
        request: GangRequest,
        *,
        blocked_N: BoolArray | None = None,
        ignoring_W: RowArray | None = None,
        near_W: RowArray | None = None,
    ) -> RowArray | Unschedulable:
        """Look for a place by what is free; quotas are looked at before.

        Args:
            request: What is to be placed.
            blocked_N: Nodes that it may not use.
            ignoring_W: Rows of the same gang's other workers: no domain is taken because of them.
            near_W: Rows of those of them that stay: the new ones go as near to them as they fit.
        """
        self._spent_nodes += len(self.inventory.names) + request.workers
        own_W = np.zeros(0, dtype=np.int32) if ignoring_W is None else ignoring_W[ignoring_W >= 0]
        began_s = 0.0 if self._stopwatch is None else self._stopwatch.now_s()
        np.subtract.at(self.inventory.busy_N, own_W, 1)
        found = place(self.inventory, request, blocked_N=blocked_N, near_W=near_W)
        np.add.at(self.inventory.busy_N, own_W, 1)
        if self._stopwatch is not None:
            self._stopwatch.spent_s.append(self._stopwatch.now_s() - began_s)
        return found if isinstance(found, Unschedulable) else found.rows_W

    def names(self, rows_W: RowArray) -> list[str]:
        """Return the nodes of rows."""
        names = self.inventory.names
        return [names[row] for row in rows_W.tolist()]

    def lingering(self, uid: str) -> int:
        """Return how many pods of a job have not ended."""
        return sum(not pod.ended for pod in self.cluster.pods.get(uid, {}).values())

    def leaving(self, uid: str) -> list[PodView]:
        """Return the pods of a job that have not ended, and whose end may be counted on."""
        found = []
        for pod in self.cluster.pods.get(uid, {}).values():
            if pod.ended:
                continue
            stuck_at_s = None if pod.ends_by_s is None else pod.ends_by_s + LEAVES_WITHIN_S
            if stuck_at_s is None or self.now_s < stuck_at_s:
                found.append(pod)
                if stuck_at_s is not None:
                    self.wake_at(stuck_at_s)
        return found

    def book(self, job: JobView, rows_W: RowArray, *, sign: int = 1) -> None:
        """Charge new places of a job to nodes and queue, domains that it has for itself included; or take that back."""
        assert job.spec is not None, "only jobs that can be read are placed"
        charge(self.inventory, gang_of(job, len(rows_W)), rows_W, sign=sign)
        move = self.quotas.charge if sign > 0 else self.quotas.release
        move(job.spec.queue_name, job.requests, len(rows_W))
        own_N = domain_rows(self.inventory, job.spec.topology.exclusive, rows_W)
        if own_N is None:
            return
        if sign > 0:
            self.exclusive[job.uid] = own_N | self.exclusive.get(job.uid, own_N)
        else:
            del self.exclusive[job.uid]
            self.exclusive |= exclusive_domains(self.inventory, self.cluster.jobs, (job.uid,))

    def intend(self, job: JobView) -> None:
        """Put the next attempt of a job among the intents: it takes capacity that others might take, too."""
        self._entries.append(next_attempt(job))

    def write(self, job: JobView, after: TrainingJobStatus) -> None:
        """Have a status written."""
        self.changed.add(job.uid)
        if after != job.status:
            self._writes.append(_write(job, after))

    def admit(self, job: JobView, rows_W: RowArray, plan: Plan | None) -> None:
        """Admit a waiting job."""
        assert job.spec is not None, "only jobs that can be read are placed"
        self.book(job, rows_W)
        self.intend(job)
        self.write(job, transition.admit(job, self.names(rows_W), self.now_s, plan=plan))


def _cancel(job: JobView) -> WriteStatus:
    """Take an admission back that may still be in flight: raise the job's count, and with it its resource version."""
    after = job.status.model_copy(update={"cancelled_admissions": job.status.cancelled_admissions + 1})
    return _write(job, after)


def _write(job: JobView, after: TrainingJobStatus) -> WriteStatus:
    return WriteStatus(ref=job.ref, uid=job.uid, resource_version=job.resource_version, before=job.status, after=after)
