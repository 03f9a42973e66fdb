"""Reassigns workers whose node was lost or could not hold their pod."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import FailedNode
from polyreme_api.job.workers import Topology
from polyreme_api.progress import Outcome
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import failed_nodes, transition
from polyreme_operator.reconcile.evacuation import leaving
from polyreme_operator.reconcile.failure_policy import Restart, judge
from polyreme_operator.reconcile.observe import current_record, lost_places
from polyreme_operator.reconcile.pre_checks import is_fresh
from polyreme_operator.reconcile.quarantine import blaming
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.stopping import has_stopped, requested_stop
from polyreme_operator.reconcile.torn import is_gang_torn
from polyreme_operator.scheduler.avoidance import marked
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.scheduler.domains import domain_rows, is_torn, rows_of
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.types.inventory import HOST_LEVEL, BoolArray, Inventory, LevelView, RowArray, Unschedulable
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView

NO_ROOM = "no other node has room"


def repair(cycle: SchedulingCycle) -> None:
    """Give each asking job new places for its lost workers; evict its gang if there are none."""
    for uid in sorted(cycle.cluster.asking):
        if cycle.full:
            cycle.decisions.again = True
            return
        job = cycle.cluster.jobs.get(uid)
        if job is not None and job.admitted:
            with blaming(uid):
                _repair_job(cycle, job)


def _repair_job(cycle: SchedulingCycle, job: JobView) -> None:
    attempt, spec = job.attempt, job.spec
    if attempt is None or spec is None or job.uid not in cycle.cluster.running:
        return
    if transition.stops_for_move(job):
        _move(cycle, job, spec)
        return
    if attempt.desired == "Stop":
        return
    snapshot = cycle.snapshot(job)
    record = current_record(snapshot)
    if record is not None and record.outcome is Outcome.SUCCEEDED:
        return
    verdict = _due(cycle, snapshot, spec)
    if verdict is None or cycle.must_read(job):
        return
    cause, nodes = verdict.failure.cause, attempt.placement.node_by_index()
    if not verdict.move:
        _restart_torn(cycle, snapshot, verdict, nodes)
        return
    failures = failed_nodes.with_failures(job.status, attempt, verdict.avoid, cause, cycle.now_s)
    found: dict[int, str] | str = "the whole gang fits elsewhere"
    widely = failed_nodes.has_failed_widely(failures, verdict.avoid)
    if not (widely and _fits_elsewhere(cycle, job, nodes, failures)):
        found = _places(cycle, job, nodes, sorted(verdict.move), failures)
        if isinstance(found, str) and verdict.move == verdict.avoid and cause is not Cause.UNSCHEDULABLE:
            some = _places_for_some(cycle, job, nodes, sorted(verdict.move), failures)
            if not some:
                _stay(cycle, snapshot, verdict, failures, why=found)
                return
            found = some
    if isinstance(found, str):
        cycle.write(job, transition.evict(snapshot, verdict, cycle.now_s))
        return
    for index, node in found.items():
        nodes[index] = node
    cycle.write(job, transition.restart(snapshot, verdict, nodes, cycle.now_s))


def _due(cycle: SchedulingCycle, snapshot: JobSnapshot, spec: TrainingJobSpec) -> Restart | None:
    """Return the restart of a gang that is due and needs other places; None if there is none."""
    verdict = judge(snapshot, spec, cycle.now_s)
    if not isinstance(verdict, Restart) or verdict.due_s > cycle.now_s:
        return None
    torn = verdict.failure.cause is not Cause.CREATE_REFUSED and _has_come_apart(cycle.inventory, snapshot)
    return verdict if verdict.move or torn else None


def _has_come_apart(inventory: Inventory, snapshot: JobSnapshot) -> bool:
    """Tell whether a gang has come apart, as the reconciler sees it."""
    named = zip(inventory.levels, inventory.level_labels, strict=True)
    levels = tuple(LevelView(name=name, node_label=label) for name, label in named if name != HOST_LEVEL)
    return is_gang_torn(dataclasses.replace(snapshot, levels=levels))


def _restart_torn(cycle: SchedulingCycle, snapshot: JobSnapshot, verdict: Restart, nodes: Sequence[str]) -> None:
    """Restart a gang that has come apart, and none of whose workers must move: together again where there is room."""
    job = snapshot.job
    if _fits_elsewhere(cycle, job, nodes, failed_nodes.remembered(job.status, cycle.now_s)):
        cycle.write(job, transition.evict(snapshot, verdict, cycle.now_s))
    else:
        cycle.write(job, transition.restart(snapshot, verdict, nodes, cycle.now_s))


def _fits_elsewhere(
    cycle: SchedulingCycle, job: JobView, nodes: Sequence[str], failures: Collection[FailedNode]
) -> bool:
    """Tell whether a running gang would fit as a whole if it gave up its place, away from the nodes that failed it."""
    rows_W = rows_of(cycle.inventory, nodes)
    own_W = rows_W[rows_W >= 0]
    cycle.book(job, own_W, sign=-1)
    blocked_N = cycle.blocked_for(job) | marked(cycle.inventory, {each.node for each in failures})
    found = cycle.place(gang_of(job, len(nodes)), blocked_N=blocked_N)
    cycle.book(job, own_W)
    return not isinstance(found, Unschedulable)


def _stay(
    cycle: SchedulingCycle, snapshot: JobSnapshot, verdict: Restart, failures: list[FailedNode], *, why: str
) -> None:
    """Try the nodes that have failed again, after a wait, since there is no other place."""
    job = snapshot.job
    assert job.attempt is not None, "only an attempt can fail"
    assert job.spec is not None, "only jobs that can be read are placed"
    nodes, cause = job.attempt.placement.node_by_index(), verdict.failure.cause
    if job.status.retry_at is not None:
        cycle.write(job, transition.restart(snapshot, verdict, nodes, cycle.now_s))
        return
    retry_by_node = failed_nodes.avoided(failures, job.spec.failure_policy.backoff)
    retry_at = rfc3339(max(retry_by_node[nodes[index]] for index in verdict.avoid))
    # A pod that is stuck would only be waited for again: the worker stays as it is until there is room elsewhere.
    tried = "it waits for that pod to end" if cause is Cause.POD_STUCK else f"it is tried again at {retry_at}"
    after = StatusBuilder(job, cycle.now_s)
    after.set(ConditionType.RESTARTING, True, cause, f"{verdict.failure.message}; {why}, {tried}")
    if cause is not Cause.POD_STUCK:
        after.update(retry_at=retry_at)
    cycle.write(job, after.set(ConditionType.RUNNING, False, Reason.STARTING).build())


def _move(cycle: SchedulingCycle, job: JobView, spec: TrainingJobSpec) -> None:
    """Begin the next attempt of a job that has stopped so that workers can leave their nodes."""
    snapshot, stop = cycle.snapshot(job), requested_stop(job)
    if stop is None or not has_stopped(snapshot, cycle.now_s) or cycle.must_read(job):
        return
    record = current_record(snapshot)
    if job.attempt is None or (record is not None and record.outcome is Outcome.SUCCEEDED):
        return
    nodes, lost = job.attempt.placement.node_by_index(), lost_places(snapshot, spec, cycle.now_s)
    moved, replaced = set(leaving(snapshot, spec, cycle.now_s)), set[int]()
    if lost is not None:
        moved, replaced = moved | lost.move, set(lost.replace)
    if moved:
        failures = failed_nodes.remembered(job.status, cycle.now_s)
        found = _places(cycle, job, nodes, sorted(moved), failures)
        if isinstance(found, str):
            cycle.write(job, transition.give_back(snapshot, stop, cycle.now_s))
            return
        for index, node in found.items():
            nodes[index] = node
    cycle.write(job, transition.move(snapshot, nodes, sorted(moved | replaced), cycle.now_s))


def _places(
    cycle: SchedulingCycle, job: JobView, nodes: Sequence[str], moved: Sequence[int], failures: Collection[FailedNode]
) -> dict[int, str] | str:
    """Find new nodes for some workers, as near to the others as the topology requires; or why they don't all fit.

    A gang that can't stay together is evicted and waits for a place as a whole. So is a gang that does not lie together
    any more because labels or levels have changed: new workers could be near to a part of it only. So is a gang whose
    domain is unknown, since the nodes of all workers that stay are gone.
    """
    assert job.spec is not None, "only jobs that can be read are placed"
    queue = job.spec.queue_name
    # A move adds no worker, so a queue that is exactly full has quota for it. One that uses more than it may, since its
    # quota was lowered or reclaimed, has none for workers that begin again.
    cycle.quotas.release(queue, job.requests, len(moved))
    fits = cycle.quotas.fits(queue, job.requests, len(moved))
    found = _nodes_for(cycle, job, nodes, moved, failures) if fits else None
    if found is None:
        cycle.quotas.charge(queue, job.requests, len(moved))
        return NO_ROOM if fits else f"queue {queue} uses more than its quota, so no worker of it may move"
    return found


def _places_for_some(
    cycle: SchedulingCycle, job: JobView, nodes: Sequence[str], moved: Sequence[int], failures: Collection[FailedNode]
) -> dict[int, str]:
    """Find new nodes for as many workers as possible, where there are none for all; the others keep theirs."""
    assert job.spec is not None, "only jobs that can be read are placed"
    nodes, found, full = list(nodes), dict[int, str](), set[int]()
    together = job.spec.topology.slice_size or len(nodes)
    for index in moved:
        # Where one worker has no room, no other of its slice has.
        if index // together in full:
            continue
        places = _places(cycle, job, nodes, [index], failures)
        if isinstance(places, str):
            full.add(index // together)
            continue
        nodes[index] = places[index]
        found |= places
    return found


def _nodes_for(
    cycle: SchedulingCycle, job: JobView, nodes: Sequence[str], moved: Sequence[int], failures: Collection[FailedNode]
) -> dict[int, str] | None:
    """Find and book new nodes for some workers, whose quota is released."""
    assert job.spec is not None, "only jobs that can be read are placed"
    rows_W = rows_of(cycle.inventory, nodes)
    left_W = rows_W[list(moved)]
    rows_W[list(moved)] = -1
    if _are_apart(cycle.inventory, job.spec.topology, rows_W, moved):
        return None
    found: dict[int, int] = {}
    for group, near_N, near_W, topology in _groups(cycle, job, rows_W, moved):
        blocked_N = cycle.blocked_for(job, spares=True)
        if near_N is not None:
            blocked_N |= ~near_N
        # A node that could not hold a pod looks free in our accounts, so it must be excluded.
        blocked_N[left_W[left_W >= 0]] = True
        blocked_N[_failed_rows(cycle, job.spec)] = True
        blocked_N |= marked(cycle.inventory, {each.node for each in failures})
        request = gang_of(job, len(group), topology=topology)
        own_W = np.concatenate((rows_W, left_W))
        placed = cycle.place(request, blocked_N=blocked_N, ignoring_W=own_W, near_W=near_W[near_W >= 0])
        if isinstance(placed, Unschedulable):
            _undo(cycle, job, found)
            return None
        found.update(zip(group, placed.tolist(), strict=True))
        cycle.book(job, placed)
    cycle.decisions.intend(job)
    return {index: cycle.inventory.names[row] for index, row in found.items()}


def _failed_rows(cycle: SchedulingCycle, spec: TrainingJobSpec) -> list[int]:
    """Return the nodes that have failed their checks recently, for a job that checks nodes."""
    if not spec.pre_checks.enabled:
        return []
    rows, now_s = cycle.inventory.rows, cycle.now_s
    return [
        rows[name]
        for name, view in cycle.cluster.nodes.items()
        if view.check_failed and name in rows and is_fresh(view, spec, now_s)
    ]


def _are_apart(inventory: Inventory, asked: Topology, rows_W: RowArray, moved: Sequence[int]) -> bool:
    """Tell whether the workers that stay, of the gang or of an affected slice, don't lie together any more."""
    stays_W = np.ones(len(rows_W), dtype=np.bool_)
    stays_W[list(moved)] = False
    if is_torn(inventory, asked.required, rows_W[stays_W]):
        return True
    size = asked.slice_size
    if size is None:
        return False
    slices = (slice(at * size, (at + 1) * size) for at in sorted({index // size for index in moved}))
    return any(is_torn(inventory, asked.slice_level, rows_W[part][stays_W[part]]) for part in slices)


def _undo(cycle: SchedulingCycle, job: JobView, found: dict[int, int]) -> None:
    if found:
        cycle.book(job, np.array(list(found.values()), dtype=np.int32), sign=-1)


def _groups(
    cycle: SchedulingCycle, job: JobView, rows_W: RowArray, moved: Sequence[int]
) -> Iterator[tuple[list[int], BoolArray | None, RowArray, Topology]]:
    """Yield groups of workers with their allowed nodes, the workers to be near to, and the remaining topology."""
    assert job.spec is not None, "only jobs that can be read are placed"
    asked = job.spec.topology
    if not (rows_W >= 0).any():
        # No worker stays, or none that has to be near, so they are placed like a new gang.
        yield list(moved), None, rows_W, asked
        return
    whole_N = domain_rows(cycle.inventory, asked.required, rows_W)
    if asked.slice_size is None:
        yield list(moved), whole_N, rows_W, Topology(exclusive=asked.exclusive)
        return
    slices: dict[int, list[int]] = defaultdict(list)
    for index in moved:
        slices[index // asked.slice_size].append(index)
    for number, group in sorted(slices.items()):
        members_W = rows_W[number * asked.slice_size : (number + 1) * asked.slice_size]
        slice_N = domain_rows(cycle.inventory, asked.slice_level, members_W)
        if slice_N is None:
            yield group, whole_N, rows_W, Topology(required=asked.slice_level, exclusive=asked.exclusive)
        else:
            among_N = slice_N if whole_N is None else slice_N & whole_N
            yield group, among_N, members_W, Topology(exclusive=asked.exclusive)
