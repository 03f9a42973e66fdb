"""Resizing of running jobs: to the worker count of a changed spec, or because an elastic job has room to grow.

The attempt is first asked to checkpoint and stop. After its outcome is known, the next attempt begins with the size
that is best then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyreme_api.job.status import AttemptStatus
from polyreme_api.job.workers import Topology
from polyreme_api.progress import Outcome
from polyreme_operator.cache.jobs import may_grow, scaled
from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.reconcile.quarantine import blaming
from polyreme_operator.reconcile.stopping import has_stopped
from polyreme_operator.scheduler import elastic
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.scheduler.domains import domain_rows, is_torn, rows_of
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.scheduler.pending import over_quota
from polyreme_operator.types.inventory import RowArray, Unschedulable
from polyreme_operator.types.views import JobView

GROW_LOOK_S = 60.0
"""How often it is checked whether growing is worth its cost."""


def resize(cycle: SchedulingCycle) -> None:
    """Begin the attempts of jobs that have stopped for a resize, and stop jobs whose spec asks for another size."""
    for uid in _candidates(cycle):
        job = cycle.cluster.jobs[uid]
        with blaming(uid):
            if transition.stops_for_resize(job):
                _begin(cycle, job)
            elif scaled(job):
                _ask(cycle, job)


def grow(cycle: SchedulingCycle) -> None:
    """Ask elastic jobs to stop if the capacity that is left makes growing worth its cost."""
    looked = False
    for uid in _candidates(cycle):
        job = cycle.cluster.jobs[uid]
        if may_grow(job) and not scaled(job) and not transition.stops_for_resize(job):
            looked = True
            with blaming(uid):
                _try_to_grow(cycle, job)
    if looked:
        cycle.decisions.wake_at(cycle.now_s + GROW_LOOK_S)


def _candidates(cycle: SchedulingCycle) -> list[str]:
    uids = sorted(uid for uid in cycle.cluster.resizing if uid not in cycle.decisions.changed)
    return uids[: cycle.limits.resizes_max]


def _ask(cycle: SchedulingCycle, job: JobView) -> None:
    """Stop an attempt whose spec asks for another count, if one of the counts that it accepts fits."""
    attempt = job.attempt
    if attempt is None or _has_outcome(cycle, job):
        return
    if job.planning is not None:
        return
    if job.plan is None:
        cycle.decisions.refuse_size(job, job.invalid)
        return
    if job.is_resize_refused and job.replicas > attempt.replicas and elastic.was_refused_last(job, cycle.now_s):
        # Asked for again when the spec changes, or after a while.
        cycle.decisions.wake_at(cycle.now_s + GROW_LOOK_S)
        return
    found = _fitting(cycle, job, attempt, (job.replicas,))
    if isinstance(found, str):
        cycle.decisions.refuse_size(job, found)
    elif not cycle.must_read(job):
        cycle.write(job, transition.stop_for_resize(job, cycle.now_s))


def _try_to_grow(cycle: SchedulingCycle, job: JobView) -> None:
    attempt = job.attempt
    if attempt is None or _has_outcome(cycle, job) or elastic.was_refused_lately(job, cycle.now_s):
        return
    current, record = attempt.replicas, current_record(cycle.snapshot(job))
    now_s, cooldown_s = cycle.now_s, cycle.limits.grow_cooldown_s
    worth = [
        count
        for count in elastic.larger_sizes(job, current)
        if elastic.worth_growing(record, job, current=current, larger=count, now_s=now_s, cooldown_s=cooldown_s)
    ]
    if not worth or isinstance(_fitting(cycle, job, attempt, worth), str) or cycle.must_read(job):
        return
    cycle.write(job, transition.stop_for_resize(job, cycle.now_s))


def _begin(cycle: SchedulingCycle, job: JobView) -> None:
    """Begin the next attempt of a job that has stopped; with its present size if no other one fits."""
    attempt, spec = job.attempt, job.spec
    if attempt is None or spec is None or job.planning is not None:
        return
    snapshot = cycle.snapshot(job)
    if not has_stopped(snapshot, cycle.now_s) or cycle.must_read(job):
        return
    record = current_record(snapshot)
    if record is not None and record.outcome is Outcome.SUCCEEDED:
        return
    if cycle.full:
        cycle.decisions.again = True
        return
    larger = elastic.larger_sizes(job, attempt.replicas) if not scaled(job) else ()
    wanted = [job.replicas] if job.plan is not None else []
    found = _fitting(cycle, job, attempt, [*larger, *wanted])
    if isinstance(found, str):
        cycle.decisions.refuse_size(job, found)
        nodes, new_W = attempt.placement.node_by_index(), np.zeros(0, dtype=np.int32)
    else:
        nodes, new_W = found
    cycle.book(job, new_W)
    cycle.decisions.intend(job)
    plan = job.plan_at(len(nodes))
    cycle.write(job, transition.resize(snapshot, nodes, cycle.now_s, plan=plan))


def _has_outcome(cycle: SchedulingCycle, job: JobView) -> bool:
    record = current_record(cycle.snapshot(job))
    return record is not None and record.outcome is not None


def _fitting(
    cycle: SchedulingCycle, job: JobView, attempt: AttemptStatus, counts: Sequence[int]
) -> tuple[list[str], RowArray] | str:
    """Return nodes for the first of these worker counts that fits, keeping present workers; or why none fits."""
    assert job.spec is not None, "only jobs that can be read are placed"
    why = job.invalid
    held = attempt.placement.node_by_index()
    for count in counts[: cycle.limits.sizes_max]:
        more = count - len(held)
        if more <= 0:
            return held[:count], np.zeros(0, dtype=np.int32)
        quota = over_quota(cycle, job, more)
        if quota is not None:
            why = quota
            continue
        rows_W = rows_of(cycle.inventory, held)
        asked = job.spec.topology
        if is_torn(cycle.inventory, asked.required, rows_W):
            why = f"its workers are no longer known to be in one {asked.required}, which topology.required asks for"
            continue
        near_N = domain_rows(cycle.inventory, asked.required, rows_W)
        blocked_N = cycle.blocked_for(job) if near_N is None else cycle.blocked_for(job) | ~near_N
        topology = Topology(slice_size=asked.slice_size, slice_level=asked.slice_level, exclusive=asked.exclusive)
        request = gang_of(job, more, topology=topology)
        found = cycle.place(request, blocked_N=blocked_N, ignoring_W=rows_W, near_W=rows_W[rows_W >= 0])
        if not isinstance(found, Unschedulable):
            return [*held, *cycle.names(found)], found
        why = found.message
    return why
