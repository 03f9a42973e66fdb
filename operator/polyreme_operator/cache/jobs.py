"""Index of all jobs: waiting, running, resizing, exclusive, quarantined, and victims by preemptor.

It is updated job by job, so that a scheduling cycle never walks jobs about which it has nothing to decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from polyreme_api.labels import MANAGER
from polyreme_cluster.port import ObjectRef
from polyreme_operator.cache.usage import BY_PLACEMENT, UsageLedger, placement_charges
from polyreme_operator.queueing.waiting import WaitingIndex
from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.data_gate import awaits_data
from polyreme_operator.types.queues import Waiting
from polyreme_operator.types.reasons import ConditionType
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True)
class JobChange:
    """Effects of a job's change on admission."""

    freed: bool = False
    """Whether usage or a reservation has ended."""
    asks: bool = False
    """Whether the scheduler has something new to decide about the job."""


class JobIndex:
    """Jobs by UID, and the sets from which decisions start."""

    def __init__(self, ledger: UsageLedger) -> None:
        self.views: dict[str, JobView] = {}
        self.refs: dict[ObjectRef, str] = {}
        """UID by reference."""
        self.waiting = WaitingIndex()
        self.running: set[str] = set()
        self.resizing: set[str] = set()
        """Running jobs that want another worker count, or may grow."""
        self.exclusive: set[str] = set()
        """Running jobs with exclusive domains."""
        self.quarantined: set[str] = set()
        self.refused: set[str] = set()
        """Jobs without an admission that their queues do not accept."""
        self.victims_of: dict[str, set[str]] = {}
        """UIDs of preempted jobs that have not been admitted again, by the UID of their preemptor."""
        self._ledger = ledger
        self._refusal: Callable[[JobView], str] = lambda job: job.queue_refusal
        self._forget: list[Callable[[str], object]] = []
        self._kinds: dict[Any, int] = {}
        self._members: dict[int, tuple[Any, set[str]]] = {}
        self._next_kind = 0

    def judge_by(self, refusal: Callable[[JobView], str]) -> None:
        """Ask this function of every job why its queue does not accept it."""
        self._refusal = refusal

    def when_removed(self, forget: Callable[[str], object]) -> None:
        """Call this function with the UID of each job that is removed."""
        self._forget.append(forget)

    def at(self, ref: ObjectRef) -> JobView | None:
        """Return a job by reference."""
        return self.views.get(self.refs.get(ref, ""))

    def put(self, job: JobView) -> JobChange:
        """Add or replace a job."""
        before, refused = self.views.get(job.uid), self._refusal(job)
        if refused != job.queue_refusal:
            job = dataclasses.replace(job, queue_refusal=refused)
        # Charge first: a job that can't be charged must not be stored.
        freed = self._charge(before, job)
        self.views[job.uid] = job
        freed |= self._index_victim(before, job)
        waited = job.uid in self.waiting
        asks = self._set_waiting(job)
        # A job that stopped waiting without an admission no longer blocks others.
        freed |= waited and job.uid not in self.waiting and not job.admitted
        runs = job.admitted and is_ours(job) and not job.quarantined
        _mark(self.running, job.uid, runs)
        alone = job.spec is not None and job.spec.topology.exclusive is not None
        _mark(self.exclusive, job.uid, alone and job.admitted and is_ours(job))
        _mark(self.quarantined, job.uid, bool(job.quarantined))
        _mark(self.refused, job.uid, bool(refused) and is_ours(job) and not job.admitted)
        resizes = runs and wants_resize(job)
        asks |= resizes and (before is None or job.uid not in self.resizing or _size(before) != _size(job))
        _mark(self.resizing, job.uid, resizes)
        if before is not None and before.status.cancelled_admissions != job.status.cancelled_admissions:
            asks = True
        return JobChange(freed=freed, asks=asks)

    def remove(self, uid: str) -> JobChange:
        """Remove a job; usage of its pods stays charged."""
        for forget in self._forget:
            forget(uid)
        job = self.views.pop(uid, None)
        if job is None:
            return JobChange()
        freed = self._charge(job, None)
        freed |= self._index_victim(job, None)
        freed |= uid in self.waiting
        self._leave(uid)
        for members in (self.running, self.resizing, self.exclusive, self.quarantined, self.refused):
            members.discard(uid)
        # Capacity reserved for it is free again.
        return JobChange(freed=freed or uid in self.victims_of)

    def of_kind(self, kind: int) -> set[str]:
        """Return the UIDs of all waiting jobs of an equivalence class."""
        members = self._members.get(kind)
        return set() if members is None else members[1]

    def _charge(self, before: JobView | None, after: JobView | None) -> bool:
        if before is not None and after is not None and _holds_alike(before, after):
            return False
        old = {} if before is None else dict(placement_charges(before))
        new = {} if after is None else dict(placement_charges(after))
        freed = False
        for place, charge in new.items():
            freed |= self._ledger.charge(place, BY_PLACEMENT, charge)
        for place in old.keys() - new.keys():
            freed |= self._ledger.release(place, BY_PLACEMENT)
        return freed

    def _index_victim(self, before: JobView | None, after: JobView | None) -> bool:
        old, new = _preempted_for(before), _preempted_for(after)
        uid = before.uid if before is not None else after.uid if after is not None else ""
        if old == new:
            return False
        if old:
            self.victims_of[old].discard(uid)
            if not self.victims_of[old]:
                del self.victims_of[old]
        if new:
            self.victims_of.setdefault(new, set()).add(uid)
        return bool(old)

    def _set_waiting(self, job: JobView) -> bool:
        if not waits(job):
            self._leave(job.uid)
            return False
        known = [self.waiting[job.uid]] if job.uid in self.waiting else []
        waiting = waiting_of(job, self._join(job))
        self.waiting.add(waiting)
        return known != [waiting]

    def _join(self, job: JobView) -> int:
        key = _kind_key(job)
        kind = self._kinds.get(key)
        if job.uid in self.waiting and self.waiting[job.uid].kind != kind:
            self._leave(job.uid)
        if kind is None:
            kind = self._kinds[key] = self._next_kind
            self._next_kind += 1
            self._members[kind] = (key, set())
        self._members[kind][1].add(job.uid)
        return kind

    def _leave(self, uid: str) -> None:
        if uid not in self.waiting:
            return
        kind = self.waiting[uid].kind
        self.waiting.remove(uid)
        key, members = self._members[kind]
        members.discard(uid)
        if not members:
            del self._members[kind], self._kinds[key]


def is_ours(job: JobView) -> bool:
    """Tell whether this operator manages the job."""
    return not job.deleting and not job.status.finished and (job.spec is None or job.spec.managed_by == MANAGER)


def waits(job: JobView) -> bool:
    """Tell whether a job waits for its admission."""
    if job.quarantined or job.spec is None or job.plan is None or job.queue_refusal:
        return False
    return is_ours(job) and not job.admitted and not (job.spec.suspend or job.paused) and not awaits_data(job)


def waiting_of(job: JobView, kind: int) -> Waiting:
    """Return a waiting job as the scheduling order sees it."""
    assert job.spec is not None, "a job without a spec waits for nothing"
    return Waiting(
        uid=job.uid,
        queue=job.spec.queue_name,
        priority=job.priority,
        since_s=job.created_s,
        workers=job.replicas,
        requests=job.requests,
        kind=kind,
        arrival=job.status.arrival,
        may_preempt=job.spec.preemption_policy != "Never" and job.status.set_aside is None,
        min_runtime_s=float(job.spec.min_runtime_seconds),
        ends_within_s=None if job.spec.active_deadline_seconds is None else float(job.spec.active_deadline_seconds),
    )


def scaled(job: JobView) -> bool:
    """Tell whether the spec asks for another worker count than when the attempt began."""
    attempt, spec, admitted = job.attempt, job.spec, job.status.condition(ConditionType.ADMITTED)
    if attempt is None or spec is None or admitted is None:
        return False
    elastic = spec.workers.min_replicas is not None or spec.workers.max_replicas is not None
    asked_since = job.generation > admitted.observed_generation or not elastic or job.is_resize_refused
    return asked_since and job.replicas != attempt.replicas


def may_grow(job: JobView) -> bool:
    """Tell whether an elastic job runs with fewer workers than it may."""
    attempt, spec = job.attempt, job.spec
    if attempt is None or spec is None:
        return False
    elastic = spec.workers.min_replicas is not None or spec.workers.max_replicas is not None
    return elastic and attempt.replicas < max(job.replicas, spec.workers.max_replicas or 0)


def wants_resize(job: JobView) -> bool:
    """Tell whether the scheduler has to decide about a running job's size."""
    if job.spec is None or job.attempt is None or job.spec.suspend:
        return False
    return transition.stops_for_resize(job) or (job.attempt.desired == "Run" and (scaled(job) or may_grow(job)))


def _size(job: JobView) -> tuple[object, ...]:
    attempt = job.attempt
    return job.generation, None if attempt is None else (attempt.number, attempt.desired, attempt.replicas)


def _preempted_for(job: JobView | None) -> str:
    if job is None or job.status.preemption is None or not is_ours(job):
        return ""
    return job.status.preemption.by


def _holds_alike(before: JobView, after: JobView) -> bool:
    if before.admitted != after.admitted:
        return False
    if not after.admitted:
        return True
    if before.requests != after.requests or before.attempt is None or after.attempt is None:
        return False
    return before.attempt.placement == after.attempt.placement


def _kind_key(job: JobView) -> Any:
    """Return the equivalence class of a job: if one job of a class does not fit, no other does."""
    spec, plan = job.spec, job.plan
    assert spec is not None, "a job without a spec waits for nothing"
    assert plan is not None, "a job without a plan waits for nothing"
    return (
        spec.queue_name,
        job.priority,
        spec.preemption_policy,
        job.replicas,
        spec.workers.min_replicas,
        job.requests,
        job.constraints,
        spec.topology.model_dump_json(),
        spec.active_deadline_seconds,
        spec.min_runtime_seconds,
        plan.layout,
        job.status.set_aside and job.status.set_aside.until,
        frozenset(each.node for each in job.status.failed_nodes),
    )


def _mark(members: set[str], uid: str, holds: bool) -> None:
    if holds:
        members.add(uid)
    else:
        members.discard(uid)
