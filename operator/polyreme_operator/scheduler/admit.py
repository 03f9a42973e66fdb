"""Admission in queue order: check the quota, find a place, try smaller sizes, then preempt others.

When a job does not fit, no job of its class is tried again until capacity is freed.
"""

from __future__ import annotations

import dataclasses
import itertools

from polyreme_operator.placement.eligible import slots_N
from polyreme_operator.placement.unsatisfiable import unsatisfiable
from polyreme_operator.queueing.order import SchedulingOrder, scheduling_order
from polyreme_operator.reconcile import set_aside
from polyreme_operator.reconcile.failure_policy import recorded_retry_s
from polyreme_operator.reconcile.quarantine import blaming
from polyreme_operator.scheduler import elastic
from polyreme_operator.scheduler.avoidance import retry_times
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.scheduler.head_of_line import HeadReservations
from polyreme_operator.scheduler.pending import beyond_quota, closed, over_quota
from polyreme_operator.scheduler.preemption.victims import make_room
from polyreme_operator.scheduler.reservations import unused
from polyreme_operator.types.inventory import BoolArray, RowArray, Unschedulable
from polyreme_operator.types.queues import Waiting
from polyreme_operator.types.reasons import Cause, Reason
from polyreme_operator.types.snapshot import Pending
from polyreme_operator.types.views import JobView
from polyreme_planner.plan import Plan

NAMED_MAX = 3
"""Jobs named by a message; the others are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A place, and the plan for its size."""

    rows_W: RowArray
    plan: Plan | None


def admit_waiting(cycle: SchedulingCycle) -> None:
    """Admit the waiting jobs that fit."""
    _Admissions(cycle).run()


class _Admissions:
    def __init__(self, cycle: SchedulingCycle) -> None:
        self._cycle = cycle
        self._cluster = cycle.cluster
        self._heads = HeadReservations(cycle)
        self._preempted_for: dict[str, JobView] = {}
        self._sought = 0

    def run(self) -> None:
        cycle, cluster = self._cycle, self._cluster
        for queue in sorted(cluster.waiting.queues()):
            why = closed(cluster.tree, queue)
            if why is not None:
                cycle.decisions.kinds.update(
                    {kind: why for _, line in cluster.waiting.lines(queue) for kind in line.by_kind}
                )
        self._serve_reservations()
        order = scheduling_order(cluster.waiting, cluster.tree, cycle.shares(), cycle.now_s)
        for waiting in order:
            if waiting.uid in cycle.decisions.changed:
                continue
            if cycle.full:
                cycle.decisions.again = True
                break
            with blaming(waiting.uid):
                self._look_at(waiting, order)

    def _serve_reservations(self) -> None:
        """Reserve for each preemptor what its victims free, and start preemptors whose victims are all gone."""
        cycle, cluster = self._cycle, self._cluster
        asked = {
            uid: unused(cluster.jobs, cluster.jobs[uid], victims)
            for uid, victims in sorted(cluster.victims_of.items())
            if uid in cluster.waiting and closed(cluster.tree, cluster.waiting[uid].queue) is None
            if cluster.waiting[uid].may_preempt
        }
        held = []
        for uid, victims in asked.items():
            if victims:
                with blaming(uid):
                    held.append(cycle.reservation_of(cluster.jobs[uid], victims))
        in_order = sorted(held, key=lambda each: _rank(each.by))
        # A reservation holds against jobs of equal and lower priority, so those of higher priority come first.
        for _, equals in itertools.groupby(in_order, key=lambda each: each.by.priority):
            together = list(equals)
            for reservation in together:
                cycle.reserve(reservation)
            for reservation in together:
                if reservation.stopping:
                    self._preempted_for.update(dict.fromkeys(asked[reservation.by.uid], reservation.by))
                else:
                    self._start_in_reserve(reservation.by)

    def _start_in_reserve(self, job: JobView) -> None:
        """Start a preemptor whose victims are gone; if it does not fit any more, it waits like other jobs."""
        with blaming(job.uid):
            self._cycle.release_reservation(job)
            if self._cycle.has_succeeded(job):
                return
            found = self._find(job)
            if isinstance(found, Found):
                self._cycle.admit(job, found.rows_W, found.plan)

    def _look_at(self, waiting: Waiting, order: SchedulingOrder) -> None:
        cycle, job = self._cycle, self._cluster.jobs[waiting.uid]
        own = self._own_obstacle(job)
        if own is not None:
            cycle.decisions.pending[job.uid] = own
            return
        known = self._cluster.refused.get(waiting.kind)
        held = cycle.release_reservation(job)
        if known is not None and held is None:
            self._refuse(waiting, known, order)
            return
        found = self._find_around_heads(waiting, job)
        if isinstance(found, Found):
            cycle.admit(job, found.rows_W, found.plan)
            order.admitted(waiting)
            return
        if held is not None and held.stopping:
            cycle.reserve(held)
            names = [_name(self._cluster.jobs[uid]) for uid in held.stopping]
            more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
            words = f"waits for {', '.join(names[:NAMED_MAX])}{more} to save a checkpoint and stop"
            cycle.decisions.pending[job.uid] = Pending(Reason.WAITING_FOR_PREEMPTION, words)
        else:
            self._make_room(waiting, job, found)
        self._refuse(waiting, found, order)

    def _own_obstacle(self, job: JobView) -> Pending | None:
        """Return the reason for which this job, but not its class, has to wait."""
        assert job.spec is not None, "a job without a spec waits for nothing"
        retry_s = recorded_retry_s(job.status, job.spec, self._cycle.now_s) or 0.0
        last = job.status.restart_records[-1:]
        if retry_s > self._cycle.now_s and last and last[0].cause == Cause.CREATE_REFUSED:
            self._cycle.decisions.wake_at(retry_s)
            return Pending(Reason.CREATE_REFUSED, f"retried at {job.status.retry_at}; {last[0].message}")
        aside_s = set_aside.until_s(job.status, self._cycle.now_s)
        if aside_s is not None:
            self._cycle.decisions.wake_at(aside_s)
            return Pending(Reason.SET_ASIDE, set_aside.message(job.status))
        if self._cycle.has_succeeded(job):
            return Pending(Reason.WAITING_FOR_CAPACITY, "has succeeded, which is being recorded")
        leaving = self._cycle.leaving(job.uid)
        if leaving:
            return Pending(Reason.WAITING_FOR_CAPACITY, f"waits for {len(leaving)} of its own pods to end")
        preemptor = self._preempted_for.get(job.uid)
        if preemptor is not None:
            return Pending(Reason.BEHIND_OTHERS, f"was preempted by {_name(preemptor)}, which starts first")
        return None

    def _find_around_heads(self, waiting: Waiting, job: JobView) -> Found | Pending:
        """Find a place outside what is reserved for the heads of queues."""
        if (never := self._unsatisfiable(job)) is not None:
            return never
        if (quota := self._never_within_quota(waiting, job)) is not None:
            return quota
        with self._heads.beside(waiting) as (held_N, before):
            found = self._find(job, held_N)
        if isinstance(found, Found) or not before:
            return found
        with self._heads.none(waiting):
            alone = self._find(job)
        if isinstance(alone, Pending):
            return alone
        name = _name(self._cluster.jobs[before[0].uid])
        return Pending(Reason.BEHIND_OTHERS, f"fits, but would delay {name}, which is ahead of it")

    def _unsatisfiable(self, job: JobView) -> Pending | None:
        """Return the reason for which a job fits at none of its sizes even on empty nodes; None if it does."""
        found = None
        for count in reversed(elastic.sizes(job)):
            found = unsatisfiable(self._cycle.inventory, gang_of(job, count))
            if found is None:
                return None
        return None if found is None else Pending(found.reason, found.message, permanent=True)

    def _never_within_quota(self, waiting: Waiting, job: JobView) -> Pending | None:
        """Return why a job exceeds its quota whatever else runs, or one of fixed size without reservations; or None.

        The second is a shortcut for the most frequent reason.
        """
        requested, *smaller = elastic.sizes(job)
        if (beyond := beyond_quota(self._cycle, job, min((requested, *smaller)))) is not None:
            return Pending(Reason.EXCEEDS_QUOTA, beyond, permanent=True)
        if smaller:
            return None
        with self._heads.none(waiting):
            quota = over_quota(self._cycle, job, requested)
        return None if quota is None else Pending(Reason.EXCEEDS_QUOTA, quota)

    def _find(self, job: JobView, held_N: BoolArray | None = None) -> Found | Pending:
        """Find a place with the best size that fits; on nodes that have failed the job only if it fits on no others.

        Args:
            job: The job.
            held_N: Nodes that are held for others.
        """
        cycle = self._cycle
        found = self._find_among(job, _with(cycle.blocked_for(job), held_N))
        if isinstance(found, Found) or not (retries := retry_times(job, cycle.now_s)):
            return found
        if early := [retry_s for retry_s in retries.values() if retry_s > cycle.now_s]:
            cycle.decisions.wake_at(min(early))
        return self._find_among(job, _with(cycle.blocked_for(job, retries=True), held_N))

    def _find_among(self, job: JobView, blocked_N: BoolArray) -> Found | Pending:
        cycle, why = self._cycle, None
        for count in self._sizes(job, blocked_N):
            quota = over_quota(cycle, job, count)
            if quota is not None:
                why = why or Pending(Reason.EXCEEDS_QUOTA, quota)
                continue
            plan = job.plan_at(count)
            found = cycle.place(gang_of(job, count, plan=plan), blocked_N=blocked_N)
            if not isinstance(found, Unschedulable):
                return Found(found, plan)
            why = why or Pending(found.reason, found.message)
        assert why is not None, "there is no size to try"
        return why

    def _sizes(self, job: JobView, blocked_N: BoolArray) -> list[int]:
        """Return the worker counts to try: the requested one, and smaller ones for which there may be room."""
        cycle = self._cycle
        requested, *smaller = elastic.sizes(job)
        if not smaller:
            return [requested]
        free = slots_N(cycle.inventory, gang_of(job, 1), blocked_N=blocked_N)
        room = int(free.sum())
        return [requested, *[count for count in smaller if count <= room][: cycle.limits.sizes_max - 1]]

    def _make_room(self, waiting: Waiting, job: JobView, why: Pending) -> None:
        """Preempt others for the head of a queue."""
        cycle = self._cycle
        if waiting.queue in self._heads or not waiting.may_preempt or _is_final(why):
            return
        if self._sought >= cycle.limits.preemptions_max:
            cycle.decisions.unsure.add(waiting.kind)
            cycle.decisions.again = True
            return
        self._sought += 1
        victims = make_room(cycle, waiting, job)
        if victims is not None:
            cycle.decisions.pending[job.uid] = Pending(Reason.WAITING_FOR_PREEMPTION, victims.message)

    def _refuse(self, waiting: Waiting, why: Pending, order: SchedulingOrder) -> None:
        self._cycle.decisions.kinds[waiting.kind] = why
        order.refuse(waiting.kind)
        self._heads.add(waiting, why)


def _with(blocked_N: BoolArray, held_N: BoolArray | None) -> BoolArray:
    return blocked_N if held_N is None else blocked_N | held_N


def _is_final(why: Pending) -> bool:
    """Tell whether preemption can't help."""
    return why.permanent or why.reason == Reason.MISCONFIGURED


def _name(job: JobView) -> str:
    return f"{job.namespace}/{job.name}"


def _rank(job: JobView) -> tuple[int, float, int, str]:
    return -job.priority, job.created_s, job.status.arrival, job.uid
