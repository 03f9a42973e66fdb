"""State of one scheduling cycle: the capacity that is left, beside the decisions made so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from polyreme_api.job import TrainingJobStatus
from polyreme_api.progress import Outcome
from polyreme_operator.placement.place import charge, place
from polyreme_operator.placement.spares import spares_N
from polyreme_operator.queueing.fair_share import Shares
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.reconcile import pre_checks, transition
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.scheduler.avoidance import avoided_nodes, marked
from polyreme_operator.scheduler.decisions import Decisions
from polyreme_operator.scheduler.domains import domain_rows, exclusive_domains, rows_of
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.scheduler.limits import Limits
from polyreme_operator.scheduler.reservations import Reservation
from polyreme_operator.scheduler.snapshot import ClusterSnapshot
from polyreme_operator.types.inventory import BoolArray, GangRequest, RowArray, SparesView, Unschedulable
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import ENDS_WITHIN_S, JobView, PodView
from polyreme_planner.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times each placement search, for metrics only."""

    now_s: Callable[[], float]
    spent_s: list[float]


class SchedulingCycle:
    """The capacity that is left, and the decisions made so far."""

    def __init__(self, cluster: ClusterSnapshot, now_s: float, limits: Limits, stopwatch: Stopwatch | None) -> None:
        self.cluster = cluster
        self.now_s = now_s
        self.limits = limits
        self.inventory = cluster.inventory
        self.quotas = QuotaLedger(cluster.tree, cluster.used)
        self._unused_quotas: QuotaLedger | None = None
        self.decisions = Decisions()
        self.exclusive = exclusive_domains(cluster.inventory, cluster.jobs, cluster.exclusive)
        self.reservations: dict[str, Reservation] = {}
        """By UID of the preemptor."""
        self._spent_nodes = 0
        self._stopwatch = stopwatch

    @property
    def unused_quotas(self) -> QuotaLedger:
        """The quotas as if no job ran."""
        if self._unused_quotas is None:
            self._unused_quotas = QuotaLedger(self.cluster.tree, {})
        return self._unused_quotas

    @property
    def full(self) -> bool:
        """Whether the cycle has used up its budget for decisions that take capacity."""
        return (
            len(self.decisions.entries) >= self.limits.admissions_max
            or self._spent_nodes >= self.limits.placement_nodes_max
        )

    def shares(self) -> Shares:
        """Return the queues' shares at the start of the cycle."""
        inventory = self.inventory
        whole = inventory.capacity_NR.sum(axis=0, dtype=np.float64)
        capacity = {resource: int(whole[at]) for at, resource in enumerate(inventory.resources)}
        return Shares(self.cluster.tree, self.cluster.used, capacity, self.now_s)

    def snapshot(self, job: JobView) -> JobSnapshot:
        """Return the snapshot from which a running job is judged."""
        pods = self.cluster.pods.get(job.uid, {})
        return JobSnapshot(
            job=job, pods=tuple(pods.values()), nodes=self.cluster.nodes, lease=self.cluster.leases.get(job.uid)
        )

    def must_read(self, job: JobView) -> bool:
        """Tell whether the job's Lease must be read first: it may hold an unseen success of the job's attempt."""
        if job.uid in self.cluster.leases_read or job.uid not in self.cluster.leases:
            return False
        self.decisions.reads.add(job.uid)
        return True

    def has_succeeded(self, job: JobView) -> bool:
        """Tell whether the last attempt reported a success that the job's status does not show yet."""
        return self._outcome(job) is Outcome.SUCCEEDED

    def _outcome(self, job: JobView) -> Outcome | None:
        record = current_record(self.snapshot(job))
        return None if record is None else record.outcome

    def place(
        self,
        request: GangRequest,
        *,
        blocked_N: BoolArray | None = None,
        ignoring_W: RowArray | None = None,
        near_W: RowArray | None = None,
    ) -> RowArray | Unschedulable:
        """Find a place in the free capacity; the caller has checked the quota.

        Args:
            request: The gang to place.
            blocked_N: Nodes that it may not use.
            ignoring_W: Rows of the same gang's other workers, which don't count as users of a domain.
            near_W: Rows of those that stay: the new workers are placed as near to them as possible.
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
        """Return the names of nodes."""
        names = self.inventory.names
        return [names[row] for row in rows_W.tolist()]

    def leaving(self, uid: str) -> list[PodView]:
        """Return the pods of a job that have not ended and are not stuck."""
        found = [
            pod for pod in self.cluster.pods.get(uid, {}).values() if not pod.ended and not pod.is_stuck(self.now_s)
        ]
        for pod in found:
            if pod.ends_by_s is not None:
                self.decisions.wake_at(pod.ends_by_s + ENDS_WITHIN_S)
        return found

    def book(self, job: JobView, rows_W: RowArray, *, sign: int = 1) -> None:
        """Charge new places of a job to nodes, queue and exclusive domains; ``sign`` -1 reverses it."""
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

    def write(self, job: JobView, after: TrainingJobStatus) -> None:
        """Add a status write."""
        self.decisions.write(job, pre_checks.with_passed(job, after, self.cluster.nodes, self.now_s))

    def admit(self, job: JobView, rows_W: RowArray, plan: Plan | None) -> None:
        """Admit a waiting job.

        An attempt without a known outcome may have succeeded without us: then the cycle is decided again.
        """
        assert job.spec is not None, "only jobs that can be read are placed"
        if job.attempt is not None and self._outcome(job) is None:
            self.must_read(job)
        self.book(job, rows_W)
        self.decisions.intend(job)
        self.write(job, transition.admit(job, self.names(rows_W), self.now_s, plan=plan))

    def blocked_for(self, job: JobView, *, spares: bool = False, retries: bool = False) -> BoolArray:
        """Return the nodes that a job may not use: exclusive or reserved for others, spares, and those that failed it.

        Args:
            job: The job.
            spares: Whether it may use spares: only repairs may.
            retries: Whether it may use nodes that have failed it and may be tried again.
        """
        pods = self.cluster.pods.get(job.uid, {}).values()
        blocked_N = marked(self.inventory, avoided_nodes(job, pods, self.now_s, retries=retries))
        if self.cluster.spares is not None and not spares:
            blocked_N |= self._spares_N(self.cluster.spares)
        for uid, own_N in self.exclusive.items():
            if uid != job.uid:
                blocked_N |= own_N
        for reservation in self.reservations.values():
            if reservation.by.uid != job.uid and job.priority <= reservation.by.priority:
                blocked_N[reservation.rows] = True
        return blocked_N

    def _spares_N(self, spares: SparesView) -> BoolArray:
        """Return the spares of this cycle: chosen once, after its repairs."""
        if self.inventory.spare_N is None:
            reserved_N = np.zeros(len(self.inventory.names), dtype=np.bool_)
            for reservation in self.reservations.values():
                reserved_N[reservation.rows] = True
            self.inventory.spare_N = spares_N(self.inventory, spares, reserved_N=reserved_N)
        return self.inventory.spare_N

    def reservation_of(self, by: JobView, victims: Collection[str]) -> Reservation:
        """Return the reservation for a job of what its victims hold."""
        nodes: list[str] = []
        stopping = []
        for uid in sorted(victims):
            victim = self.cluster.jobs[uid]
            if victim.attempt is None:
                continue
            nodes += victim.attempt.placement.node_by_index()
            if victim.admitted or self.leaving(uid):
                stopping.append(uid)
        rows = rows_of(self.inventory, nodes)
        return Reservation(by=by, rows=np.unique(rows[rows >= 0]), stopping=tuple(stopping))

    def reserve(self, reservation: Reservation) -> None:
        """Reserve nodes and quota for a preemptor."""
        job = reservation.by
        assert job.spec is not None, "only jobs that can be read wait"
        self.reservations[job.uid] = reservation
        self.quotas.charge(job.spec.queue_name, job.requests, job.replicas)

    def release_reservation(self, job: JobView) -> Reservation | None:
        """Release what is reserved for a job, and return it."""
        reservation = self.reservations.pop(job.uid, None)
        if reservation is not None and job.spec is not None:
            self.quotas.release(job.spec.queue_name, job.requests, job.replicas)
        return reservation
