"""Events of status writes: stable reasons, once for each change."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.events import events_of
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import EmitEvent, WriteStatus
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import JobView, PodPhase
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, pod, snapshot


def told(owner: JobView, after: TrainingJobStatus) -> list[tuple[str, bool]]:
    write = WriteStatus(ref=owner.ref, uid=owner.uid, resource_version="1", before=owner.status, after=after)
    return [(event.reason, event.warning) for event in events_of(write)]


def by_status(kind: ConditionType, reason: Reason, *, holds: bool = True) -> Callable[[JobView], TrainingJobStatus]:
    return lambda owner: StatusBuilder(owner, NOW_S).set(kind, holds, reason, "m").build()


def preempted(owner: JobView) -> TrainingJobStatus:
    return transition.stop_for_preemption(owner, job("urgent"), reclaim=False, now_s=NOW_S)


def succeeded(owner: JobView) -> TrainingJobStatus:
    return StatusBuilder(owner, NOW_S).finish(succeeded=True, reason=Reason.COMPLETED, message="m").build()


def failed(owner: JobView) -> TrainingJobStatus:
    return StatusBuilder(owner, NOW_S).finish(succeeded=False, reason=Reason.NO_PROGRESS, message="m").build()


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (preempted, [("Preempting", True)]),
        (by_status(ConditionType.PREEMPTED, Reason.PREEMPTED), [("Preempted", True)]),
        (by_status(ConditionType.PREEMPTED, Reason.RECLAIMED), [("Reclaimed", True)]),
        (by_status(ConditionType.PREEMPTED, Reason.ADMITTED, holds=False), []),
        (by_status(ConditionType.QUEUED, Reason.EVICTED), [("Evicted", True)]),
        (by_status(ConditionType.QUEUED, Reason.WAITING_FOR_CAPACITY), []),
        (by_status(ConditionType.RUNNING, Reason.STALLED, holds=False), [("Stalled", True)]),
        (by_status(ConditionType.RESIZE_REFUSED, Reason.NO_FIT), [("ResizeRefused", True)]),
        (by_status(ConditionType.SUSPENDED, Reason.SUSPENDED), [("Suspended", False)]),
        (by_status(ConditionType.SUSPENDED, Reason.SUSPENDED, holds=False), []),
        (lambda owner: transition.stop_for_suspend(owner, NOW_S), [("Suspending", False)]),
        (succeeded, [("Completed", False)]),
        (failed, [("NoProgress", True)]),
        (lambda owner: owner.status.model_copy(update={"step": 9}), []),
    ],
)
def test_an_event_names_the_reason_of_a_change(
    after: Callable[[JobView], TrainingJobStatus], expected: list[tuple[str, bool]]
) -> None:
    owner = admitted(job())
    changed = after(owner)
    assert told(owner, changed) == expected
    assert told(dataclasses.replace(owner, status=changed), changed) == []


def test_events_of_attempts_name_their_origin() -> None:
    owner = job()
    assert told(owner, transition.admit(owner, ("n0", "n0"), NOW_S)) == [("Admitted", False)]
    running = admitted(job(replicas=4), ("n0",) * 4)
    shrunk = transition.resize(snapshot(running), ["n0"] * 2, NOW_S, plan=job(replicas=2).plan)
    assert told(running, shrunk) == [("Shrunk", False)]
    smaller = dataclasses.replace(running, status=shrunk)
    assert told(smaller, transition.resize(snapshot(smaller), ["n0"] * 4, NOW_S)) == [("Grown", False)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"phase": PodPhase.FAILED}, "Restarted"),
        ({"deleting": True, "conditions": (("DisruptionTarget", "True"),)}, "Evicted"),
    ],
)
def test_a_restart_event_has_its_cause_and_one_key_per_attempt(fields: dict[str, Any], reason: str) -> None:
    owner = admitted(job())
    seen = snapshot(owner, pods=(pod(owner, 0), pod(owner, 1, **fields)), lease=lease(owner, step=3))
    actions = reconcile(seen, NOW_S, defaults=PodDefaults()).actions
    (event,) = (action for action in actions if isinstance(action, EmitEvent))
    assert (event.reason, event.warning, event.key) == (reason, True, f"2-{reason.lower()}")
    assert event.message.startswith("RestartPod: worker 1: pod ")
