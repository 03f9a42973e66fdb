"""Next need of a repair that a node's record asks for: a look at its Job, a Job, the end of one, an empty node.

The record is decided first and only followed here. A Job is never created for a record that was not just read from the
API server, so an older leader can't begin a repair that has moved on.
"""

from __future__ import annotations

import dataclasses

from polyreme_operator.health import repair
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.record import Leave, NodeState, Record, Repair, RepairPhase
from polyreme_operator.health.repair import JobSight
from polyreme_operator.health_decision.snapshot import Limits, NodeView, RepairWrite

LOOK_S = 2.0
"""How often the Job of a repair under way is read."""
EVICT_FIRST_S = 5.0
EVICT_MAX_S = 300.0
"""Pause after an eviction that a budget refuses; it doubles up to this."""
EVICT_TRIES_MAX = 12
"""Evictions of a node that are refused in a row, about 40 minutes; after them a person must free it."""
PODS_MAX = 256
"""Pods of one node that are evicted in one round."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is known of a repair, and what it needs."""

    job: JobSight | None = None
    """What was read of its Job."""
    write: RepairWrite | None = None
    blocked: str = ""
    """Why it can't begin, if people should know."""
    wake_at_s: float | None = None


def progress_of(view: NodeView, policy: PolicyView | None, *, limits: Limits, now_s: float) -> Progress:
    """Return what the repair of a node needs."""
    record, job = view.facts.record, view.facts.job
    hooks = limits.repairs and policy is not None and bool(policy.hooks)
    if record is None or not (record.repair is not None or (hooks and record.state is NodeState.REPAIRING)):
        return Progress()
    if record.repair is None or record.repair.phase is RepairPhase.WAIT:
        return _emptied(view, record, policy, now_s)
    if record.repair.phase is RepairPhase.SETTLE:
        return Progress()
    known = job if job is not None and job.name == record.repair.job else None
    if known is None or now_s - known.at_s >= LOOK_S:
        template = "" if policy is None else repair.template_of(policy, record.repair)
        look = RepairWrite(node=view.node.name, look=record.repair, template=template)
        return Progress(job=known, write=look, wake_at_s=now_s + LOOK_S)
    if record.repair.phase is RepairPhase.STOP:
        write = RepairWrite(node=view.node.name, delete=known) if known.uid else None
        return Progress(job=known, write=write, wake_at_s=known.at_s + LOOK_S)
    if known.uid or record.repair.uid or known.left:
        return Progress(job=known, wake_at_s=known.at_s + LOOK_S)
    return _created(record, record.repair, policy, known, node=view.node.name, namespace=limits.namespace)


def _created(
    record: Record, under_way: Repair, policy: PolicyView | None, job: JobSight, *, node: str, namespace: str
) -> Progress:
    """Create the Job of a repair, or say why that is not possible."""
    why, blocked, wake_at_s = "", job.message, job.at_s + LOOK_S
    if policy is None or policy.breaker.latched:
        why = "the breaker is latched, or the policy is gone"
    elif not job.asked:
        why = "its record has changed"
    elif job.template is None:
        blocked = f"there is no PodTemplate {namespace}/{repair.template_of(policy, under_way)}; create it"
    if policy is None or job.template is None or why or blocked:
        known = dataclasses.replace(job, message=why or blocked)
        return Progress(job=known, blocked="" if why else blocked, wake_at_s=wake_at_s)
    made = repair.job_of(job.template, record, under_way, policy, node=node, namespace=namespace)
    write = RepairWrite(node=node, create=made, template=repair.template_of(policy, under_way))
    return Progress(job=job, write=write, wake_at_s=wake_at_s)


def _emptied(view: NodeView, record: Record, policy: PolicyView | None, now_s: float) -> Progress:
    """Ask the Eviction API to move the pods of others, if the repair could begin without them."""
    wanted = record.state is NodeState.REPAIRING and record.leave is not Leave.STAY
    may = policy is not None and policy.enforce and not view.node.claimed and not policy.breaker.latched
    begins = record.repair is not None or bool(repair.first_action(policy, record))
    if not view.others:
        return Progress()
    if not (wanted and may and begins):
        return Progress(wake_at_s=now_s + LOOK_S)
    if view.refused >= EVICT_TRIES_MAX:
        named = ", ".join(f"{ref.namespace}/{ref.name}" for ref in view.others[:3])
        why = f"{len(view.others)} pods can't be evicted ({named}); a person must move them before the repair"
        return Progress(blocked=why, wake_at_s=now_s + LOOK_S)
    waits_s = min(EVICT_MAX_S, EVICT_FIRST_S * 2.0**view.refused)
    if view.evicted_s and now_s < view.evicted_s + waits_s:
        return Progress(wake_at_s=now_s + LOOK_S)
    return Progress(write=RepairWrite(node=view.node.name, evict=view.others[:PODS_MAX]), wake_at_s=now_s + LOOK_S)
