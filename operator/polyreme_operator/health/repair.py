"""Repairs by hooks: which action is tried next, what a finished Job means, and when to go on to a graver action.

The record says what is to run before the Job exists, and the Job's name follows from node, incident, action and
attempt. So a crash at any line creates no second Job, and a stopped repair is continued by the next leader.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from polyreme_api import labels
from polyreme_api.fault_policy import RepairHook
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.record import NodeState, Record, Repair, RepairAction, RepairPhase, StopThen

LADDER = tuple(RepairAction)
LATE_S = 60.0
"""Longest time that the create of a Job may be under way."""
CREATE_S = 120.0
"""How long the create of a Job is tried; then the repair is withdrawn, so that the node can be examined meanwhile."""
RETRY_S = 120.0
"""Time from a repair that was withdrawn to its next start."""
GRACE_S = 60.0
"""Time beyond its deadline in which a Job should have been ended by its own controller."""
STOP_MAX_S = 600.0
"""Longest wait for a deleted Job to be gone, as on a node whose kubelet does not answer."""
POD_GRACE_S = 30
"""Longest grace period of a hook's pod."""
KEPT_S = 86_400
"""How long a finished Job is kept, for its log."""
LABEL = f"{labels.GROUP}/repair"
"""Label of a Job and of its pod: the action, or ``Check``."""
NODE = f"{labels.GROUP}/node"
"""Annotation of a Job: the node that it is for."""
_SAFE = re.compile(r"[A-Za-z0-9_.:/-]{0,128}", re.ASCII)


class JobState(StrEnum):
    """What a Job has come to."""

    MISSING = "Missing"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSight:
    """What was last read of a Job."""

    name: str
    uid: str = ""
    state: JobState = JobState.MISSING
    message: str = ""
    left: str = ""
    """Name of another Job of the node that still runs: its record was damaged or removed, so nothing else names it."""
    template: Mapping[str, Any] | None = None
    """The PodTemplate that it would be made from; None: there is none."""
    asked: bool = False
    """Whether the node, which was read after all this, still asks for it and is out of service."""
    at_s: float = 0.0
    """When all this was read."""


def hook_of(policy: PolicyView | None, action: str) -> RepairHook | None:
    """Return the hook of an action."""
    return next((hook for hook in (policy.hooks if policy is not None else ()) if hook.action == action), None)


def first_action(policy: PolicyView | None, record: Record) -> RepairAction | None:
    """Return the action that a repair begins with: the one that the fault asks for, or a graver one that has a hook.

    Each recurrence in probation begins one action later. None: no hook fits.
    """
    if record.action not in LADDER:
        return None
    fitting = [
        each for each in LADDER[LADDER.index(RepairAction(record.action)) :] if hook_of(policy, each) is not None
    ]
    return fitting[min(record.recurrences, len(fitting) - 1)] if fitting else None


def begun(record: Record, policy: PolicyView, *, node: str, now_s: float) -> Record:
    """Return the record of a node whose next repair begins; the same record if there is nothing to begin."""
    known = record.repair
    if known is None:
        action, attempt = first_action(policy, record), 1
    elif known.phase is RepairPhase.WAIT and now_s >= known.deadline_s:
        action, attempt = known.action, known.attempt
    else:
        return record
    if action is None or hook_of(policy, action) is None:
        return record
    return _in_phase(record, RepairPhase.REPAIR, action, attempt, node=node, now_s=now_s)


def advanced(record: Record, policy: PolicyView | None, sight: JobSight | None, *, node: str, now_s: float) -> Record:
    """Follow the Job of a repair that is under way.

    Args:
        record: The node's record.
        policy: Its policy; None: none selects it any more, and nothing new is begun.
        sight: What was last read of the Job; None: nothing yet.
        node: Name of the node.
        now_s: The time.
    """
    record = _not_in_the_future(record, now_s)
    known = record.repair
    if known is None or sight is None or sight.name != known.job:
        return record
    if known.phase is RepairPhase.STOP:
        return _stopped(record, known, policy, sight, now_s)
    if known.phase not in {RepairPhase.REPAIR, RepairPhase.CHECK}:
        return record
    if not known.uid:
        if sight.left:
            why = f"Job {sight.left} of a lost record still ran"
            return record.but(repair=_stop(known.but(job=sight.left), StopThen.SAME, why, now_s))
        if not sight.uid:
            late = now_s >= known.at_s + CREATE_S
            return record.but(repair=_stop(known, StopThen.SAME, sight.message, now_s)) if late else record
        known = known.but(uid=sight.uid, deadline_s=round(now_s + _deadline_s(policy, known) + GRACE_S, 3))
        record = record.but(repair=known)
    if sight.uid != known.uid:
        return _next(record, known, policy, "its Job was deleted", now_s)
    if sight.state is JobState.FAILED:
        return _next(record, known, policy, sight.message or "its Job failed", now_s)
    if sight.state is JobState.SUCCEEDED:
        return _succeeded(record, known, policy, node=node, now_s=now_s)
    if now_s >= known.deadline_s:
        why = "its Job did not end before its deadline"
        return record.but(repair=_stop(known, StopThen.NEXT, why, now_s))
    return record


def look_at_s(repair: Repair, now_s: float) -> float:
    """Return when a repair that is under way is decided about next, if nothing is read of its Job until then."""
    if repair.phase is RepairPhase.STOP and now_s < repair.at_s + LATE_S:
        return repair.at_s + LATE_S
    return repair.deadline_s or now_s + CREATE_S


def settled(record: Record, policy: PolicyView | None, now_s: float) -> Record:
    """Give up waiting for the fault to be gone after a repair that reported success."""
    known = record.repair
    if known is None or known.phase is not RepairPhase.SETTLE or now_s < known.deadline_s:
        return record
    return _next(record, known, policy, "it reported success, and the fault is still there", now_s)


def ended(repair: Repair | None, now_s: float) -> Repair | None:
    """Return what is left of a repair when its node returns to service: a Job that may still run is stopped."""
    if repair is None or repair.phase in {RepairPhase.WAIT, RepairPhase.SETTLE}:
        return None
    return _stop(repair, StopThen.END, repair.why, now_s)


def job_name(node: str, since_s: float, step: str, attempt: int) -> str:
    """Return the name of a Job, which follows from the incident and the step."""
    text = f"{node}/{since_s:.3f}/{step}/{attempt}"
    return f"node-repair-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def template_of(policy: PolicyView, repair: Repair) -> str:
    """Return the name of the PodTemplate of a repair's Job; empty: the policy names none any more."""
    if repair.phase is RepairPhase.CHECK:
        return policy.check.template if policy.check is not None else ""
    hook = hook_of(policy, repair.action)
    return hook.template if hook is not None else ""


def job_of(
    template: Mapping[str, Any], record: Record, repair: Repair, policy: PolicyView, *, node: str, namespace: str
) -> dict[str, Any]:
    """Return the Job of a repair.

    Args:
        template: The PodTemplate that its hook names.
        record: The node's record.
        repair: The repair that is under way.
        policy: The policy of the node.
        node: Name of the node.
        namespace: Namespace of the template and of the Job.
    """
    step = "Check" if repair.phase is RepairPhase.CHECK else repair.action
    given = template.get("template") or {}
    metadata, spec = given.get("metadata") or {}, dict(given.get("spec") or {})
    facts = {"NODE": node, "ACTION": repair.action, "FAULT": record.reason, "DEVICE": record.device}
    env = [
        {"name": f"POLYREME_{name}", "value": value if _SAFE.fullmatch(value) else ""} for name, value in facts.items()
    ]
    spec["containers"] = [{**each, "env": [*(each.get("env") or ()), *env]} for each in spec.get("containers") or ()]
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = min(POD_GRACE_S, _whole(spec.get("terminationGracePeriodSeconds")))
    hook = hook_of(policy, repair.action)
    if repair.phase is RepairPhase.CHECK or hook is None or hook.run_on == "Node":
        spec |= {"nodeName": node, "tolerations": [{"operator": "Exists"}]}
    tags = {LABEL: step.lower()}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": repair.job, "namespace": namespace, "labels": tags, "annotations": {NODE: node}},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(_deadline_s(policy, repair)),
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {
                "metadata": {"labels": {**(metadata.get("labels") or {}), **tags}, "annotations": {NODE: node}},
                "spec": spec,
            },
        },
    }


def job_sight(job: Mapping[str, Any]) -> JobSight:
    """Read a Job."""
    metadata, status = job["metadata"], job.get("status") or {}
    true = {each.get("type"): each for each in status.get("conditions") or () if each.get("status") == "True"}
    state = JobState.RUNNING
    message = ""
    if "Complete" in true:
        state = JobState.SUCCEEDED
    elif "Failed" in true:
        state = JobState.FAILED
        message = f"{true['Failed'].get('reason') or ''}: {true['Failed'].get('message') or ''}"[:256]
    return JobSight(name=metadata["name"], uid=metadata["uid"], state=state, message=message)


def runs_on(job: Mapping[str, Any], node: str) -> bool:
    """Tell whether a Job is a repair of a node that has not ended."""
    metadata = job["metadata"]
    ours = LABEL in (metadata.get("labels") or {}) and (metadata.get("annotations") or {}).get(NODE) == node
    return ours and job_sight(job).state is JobState.RUNNING


# ---------------------------------------------------------------------------------------------------------------- parts


def _not_in_the_future(record: Record, now_s: float) -> Record:
    """Count a repair from now whose beginning lies in the future: another leader's clock was ahead."""
    known = record.repair
    if known is None or known.at_s <= now_s:
        return record
    lasts_s = max(0.0, known.deadline_s - known.at_s)
    deadline_s = round(now_s + lasts_s, 3) if known.deadline_s else 0.0
    return record.but(repair=known.but(at_s=now_s, deadline_s=deadline_s))


def _in_phase(
    record: Record, phase: RepairPhase, action: RepairAction, attempt: int, *, node: str, now_s: float
) -> Record:
    step = action if phase is RepairPhase.REPAIR else f"Check-{action}"
    repair = Repair(
        action=action, attempt=attempt, phase=phase, job=job_name(node, record.since_s, step, attempt), at_s=now_s
    )
    return record.but(repair=repair, state=NodeState.REPAIRING)


def _succeeded(record: Record, known: Repair, policy: PolicyView | None, *, node: str, now_s: float) -> Record:
    if known.phase is RepairPhase.REPAIR and policy is not None and policy.check is not None:
        return _in_phase(record, RepairPhase.CHECK, known.action, known.attempt, node=node, now_s=now_s)
    settle_s = 600.0 if policy is None else policy.settle_s
    repair = known.but(phase=RepairPhase.SETTLE, at_s=now_s, deadline_s=round(now_s + settle_s, 3))
    # A boot ends its faults by itself: the agent reports them no more. What is shown until then must count.
    repaired_at_s = record.repaired_at_s if known.action == "Reboot" else now_s
    return record.but(repair=repair, repaired_at_s=repaired_at_s)


def _stop(known: Repair, then: StopThen, why: str, now_s: float) -> Repair:
    deadline_s = round(now_s + STOP_MAX_S, 3)
    return known.but(phase=RepairPhase.STOP, then=then, at_s=round(now_s, 3), deadline_s=deadline_s, why=why[:128])


def _stopped(record: Record, known: Repair, policy: PolicyView | None, sight: JobSight, now_s: float) -> Record:
    # A create may still be under way, and a deleted Job's pod has its grace period.
    gone = not sight.uid and now_s >= known.at_s + LATE_S
    if not gone and now_s < known.deadline_s:
        return record
    if known.then is StopThen.END:
        return record.but(repair=None)
    if known.then is StopThen.SAME:
        return _waiting(record, known.action, known.attempt, now_s + RETRY_S, now_s)
    return _next(record, known, policy, known.why, now_s)


def _next(record: Record, known: Repair, policy: PolicyView | None, why: str, now_s: float) -> Record:
    """Go on to the next attempt, to the next action, or retire the node."""
    if policy is None or not policy.hooks:
        return record.but(repair=None)
    hook = hook_of(policy, known.action)
    if hook is not None and known.attempt < hook.attempts:
        return _waiting(record, known.action, known.attempt + 1, now_s, now_s)
    later = [each for each in LADDER[LADDER.index(known.action) + 1 :] if hook_of(policy, each) is not None]
    if later:
        return _waiting(record, later[0], 1, now_s, now_s)
    evidence = f"no repair helped; {known.action}, attempt {known.attempt}: {why}"
    return record.but(repair=None, state=NodeState.RETIRED, evidence=evidence[:256])


def _waiting(record: Record, action: RepairAction, attempt: int, until_s: float, now_s: float) -> Record:
    until_s = round(until_s, 3)
    return record.but(
        repair=Repair(action=action, attempt=attempt, phase=RepairPhase.WAIT, at_s=now_s, deadline_s=until_s)
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else POD_GRACE_S


def _deadline_s(policy: PolicyView | None, known: Repair) -> float:
    if known.phase is RepairPhase.CHECK:
        return 900.0 if policy is None or policy.check is None else policy.check.deadline_seconds
    hook = hook_of(policy, known.action)
    return 900.0 if hook is None else hook.deadline_seconds
