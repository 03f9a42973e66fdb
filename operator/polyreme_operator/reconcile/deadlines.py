"""Deadlines: when time alone changes what is to be done for a job."""

from __future__ import annotations

from polyreme_api.job import TrainingJobSpec
from polyreme_operator.reconcile import environment_runtime, evacuation, refusals
from polyreme_operator.reconcile.observe import (
    REFUSED_S,
    UNSCHEDULABLE_S,
    current_record,
    node_lost_at_s,
    silence_deadline_s,
    slow_start_s,
)
from polyreme_operator.reconcile.stopping import STOP_GRACE_S
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import ENDS_WITHIN_S, JobView


def active_deadline_s(job: JobView, spec: TrainingJobSpec) -> float | None:
    """Return when the job has run for as long as it may; None if it has no limit or was never admitted."""
    recorded_s = parse_time_or(job.status.first_admitted_at, None)
    admitted_s = recorded_s if job.first_admitted_s is None else job.first_admitted_s
    if admitted_s is None or spec.active_deadline_seconds is None:
        return None
    return admitted_s + spec.active_deadline_seconds


def failure_s(snapshot: JobSnapshot, spec: TrainingJobSpec) -> float | None:
    """Return when time alone causes a failure: silence, a lost node, or a pod that stays unschedulable."""
    attempt = snapshot.job.attempt
    placed = () if attempt is None else dict.fromkeys(attempt.placement.node_by_index())
    nodes = [snapshot.nodes[name] for name in placed if name in snapshot.nodes]
    times_s = [
        at_s
        for index, name in enumerate(() if attempt is None else attempt.placement.node_by_index())
        if (node := snapshot.nodes.get(name)) is not None and not node.ready
        if (at_s := node_lost_at_s(snapshot, spec, index, node)) is not None
    ]
    times_s += [
        pod.unschedulable_since_s + UNSCHEDULABLE_S for pod in snapshot.pods if pod.unschedulable_since_s is not None
    ]
    times_s += [due_s for node in nodes if (due_s := evacuation.finish_deadline_s(node, spec)) is not None]
    environment = environment_runtime.is_used(spec)
    silent_s = (environment_runtime.start_deadline_s if environment else silence_deadline_s)(snapshot, spec)
    times_s += [refusal.since_s + REFUSED_S for refusal in snapshot.refusals if refusal.ends_attempt]
    children_s = snapshot.children_until_s, refusals.next_try_s(snapshot, current_record(snapshot))
    times_s += [at_s for at_s in (silent_s, *children_s, slow_start_s(snapshot)) if at_s is not None]
    return min(times_s, default=None)


def node_lost_s(spec: TrainingJobSpec | None) -> float:
    """Return how long a node may be silent before its pods count as lost."""
    return STOP_GRACE_S if spec is None else spec.health.node_lost_seconds


def fence_s(snapshot: JobSnapshot, now_s: float) -> float | None:
    """Return when a pod that is being deleted counts as stuck, or its node as lost."""
    lost_s, deleting = node_lost_s(snapshot.job.spec), [pod for pod in snapshot.pods if pod.deleting]
    nodes = (snapshot.nodes.get(pod.node) for pod in deleting)
    since_s = (node.not_ready_since_s for node in nodes if node is not None)
    times_s = [at_s + lost_s for at_s in since_s if at_s is not None]
    times_s += [pod.ends_by_s + ENDS_WITHIN_S for pod in deleting if pod.ends_by_s is not None]
    return min((at_s for at_s in times_s if at_s > now_s), default=None)
