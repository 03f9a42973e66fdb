"""One job's passes as tables."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.times import rfc3339
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import (
    Action,
    CreateChild,
    CreatePod,
    CreateSecret,
    Decision,
    DeleteJob,
    DeletePod,
    ReadLease,
    WriteStatus,
)
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import JobSnapshot, Pending
from polyreme_operator.types.views import JobView, PodPhase
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, node, pod, snapshot


def decide(seen: JobSnapshot, now_s: float = NOW_S) -> Decision:
    return reconcile(seen, now_s, defaults=PodDefaults())


def of_type(decision: Decision, *kinds: type) -> list[Any]:
    return [action for action in decision.actions if isinstance(action, kinds)]


def written(decision: Decision) -> Any:
    (write,) = of_type(decision, WriteStatus)
    return write.after


def names(actions: tuple[Action, ...]) -> set[str]:
    return {type(action).__name__ for action in actions}


def test_an_admitted_job_first_gets_what_its_pods_need() -> None:
    decision = decide(snapshot(admitted(job(), replicas=0), children=frozenset()))
    kinds = [action.manifest["kind"] for action in of_type(decision, CreateChild, CreateSecret)]
    assert kinds == ["Service", "Secret", "Lease"]
    assert len(decision.actions) == 3


def test_pods_come_behind_the_lease_on_the_nodes_of_the_placement() -> None:
    owner = admitted(job(), ("n1", "n0"), replicas=0)
    created = of_type(decide(snapshot(owner, lease=lease(owner, attempt=9))), CreatePod)
    assert [action.manifest["spec"]["nodeName"] for action in created] == ["n1", "n0"]
    manifest = created[1].manifest
    assert manifest["metadata"]["name"] == "j-uidj-1-0"
    assert manifest["spec"]["restartPolicy"] == "Never"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == owner.uid


def test_pods_are_created_only_after_the_lease_was_read() -> None:
    owner = admitted(job(), replicas=0)
    decision = decide(snapshot(owner, lease=lease(owner, attempt=9), lease_read=False))
    assert names(decision.actions) == {"ReadLease"}


@pytest.mark.parametrize(
    ("old", "waits"),
    [({}, True), ({"deleting": True}, True), ({"phase": PodPhase.FAILED}, False)],
)
def test_a_replacement_waits_until_the_old_pod_is_gone(old: dict[str, Any], waits: bool) -> None:
    owner = restarted_pod()
    seen = snapshot(owner, pods=(pod(owner, 0), pod(owner, 1, **old)), lease=lease(owner, attempt=2, released=False))
    decision = decide(seen)
    assert bool(of_type(decision, CreatePod)) != waits
    assert bool(of_type(decision, DeletePod)) == (not old.get("deleting", False))


def test_a_pod_on_a_lost_node_is_deleted_by_force_and_by_uid() -> None:
    owner = restarted_pod()
    lost = node("n1", ready=False, not_ready_since_s=NOW_S - 500)
    stale = pod(owner, 1, where="n1", deleting=True)
    seen = snapshot(
        owner,
        pods=(pod(owner, 0), stale),
        nodes={"n0": node(), "n1": lost},
        lease=lease(owner, attempt=2, released=False),
    )
    (delete,) = of_type(decide(seen), DeletePod)
    assert (delete.uid, delete.grace_s) == (stale.uid, 0)


def restarted_pod() -> JobView:
    owner = admitted(job())
    seen = snapshot(owner, pods=(pod(owner, 0), pod(owner, 1, phase=PodPhase.FAILED)), lease=lease(owner, step=3))
    return dataclasses.replace(owner, status=written(decide(seen)))


def test_a_restart_is_one_status_write_with_the_budget_and_the_lost_time() -> None:
    owner = admitted(job())
    ended = lease(
        owner, step=10, stepSeconds=2.0, checkpoint={"attempt": 1, "step": 8}, exits=[{"rank": 1, "signal": 9}]
    )
    decision = decide(snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=ended))
    status = written(decision)
    assert names(decision.actions) == {"WriteStatus", "EmitEvent"}
    assert (status.attempt.number, status.attempt.scope, status.restarts) == (2, "RestartProcess", 1)
    assert owner.attempt is not None
    assert status.attempt.placement == owner.attempt.placement
    assert status.is_true("Restarting")
    lost = {entry.cause: entry.milliseconds for entry in status.accounting.lost}
    assert (status.accounting.effective_milliseconds, lost) == (16_000, {"RankKilled": 4_000, "Starting": 80_000})


def test_a_restart_because_of_pods_reads_the_lease_first_and_finds_the_success() -> None:
    owner = admitted(job())
    pods = (pod(owner, 0, phase=PodPhase.SUCCEEDED), pod(owner, 1))
    unread = decide(snapshot(owner, pods=pods, lease=lease(owner), lease_read=False))
    assert [type(action) for action in unread.actions] == [ReadLease]
    told = lease(owner, step=50, phase="Done", outcome="Succeeded", stepSeconds=1.0)
    status = written(decide(snapshot(owner, pods=pods, lease=told)))
    assert status.is_true("Succeeded")
    assert (status.ready, status.ready_replicas) == ("2/2", 0), "all of its pods had joined, and none is there any more"
    assert not status.is_true("Admitted")
    assert not status.is_true("Failed")


def test_a_wait_before_a_restart_is_on_record_and_begins_no_attempt() -> None:
    owner = admitted(job())
    ended = lease(owner, exits=[{"rank": 0, "code": 7}])
    decision = decide(snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=ended))
    status = written(decision)
    assert status.attempt.number == 1
    assert status.retry_at == rfc3339(NOW_S + 5)
    assert decision.wake_at_s == NOW_S + 5
    later = dataclasses.replace(owner, status=status)
    again = decide(snapshot(later, pods=(pod(later, 0), pod(later, 1)), lease=ended), NOW_S + 5)
    assert written(again).attempt.number == 2
    assert written(again).retry_at is None


def test_a_lost_node_is_left_to_the_scheduler() -> None:
    owner = admitted(job(), ("n0", "n1"))
    away = {"n0": node(), "n1": node("n1", out_of_service=True)}
    pods = (pod(owner, 0), pod(owner, 1, where="n1"))
    decision = decide(snapshot(owner, pods=pods, nodes=away, lease=lease(owner, step=1)))
    assert decision == Decision(reschedule=True, wake_at_s=decision.wake_at_s)


def test_suspend_checkpoints_then_stops_then_deletes() -> None:
    owner = admitted(job(suspend=True))
    pods = (pod(owner, 0), pod(owner, 1))
    asked = written(decide(snapshot(owner, pods=pods, lease=lease(owner, step=10))))
    assert (asked.attempt.desired, asked.attempt.checkpoint_requested) == ("Stop", True)
    assert asked.is_true("Admitted")
    owner = dataclasses.replace(owner, status=asked)
    assert decide(snapshot(owner, pods=pods, lease=lease(owner, step=10))).actions == ()
    stopped = written(decide(snapshot(owner, pods=pods, lease=lease(owner, step=10, outcome="Stopped"))))
    assert not stopped.is_true("Admitted")
    assert stopped.is_true("Suspended")
    owner = dataclasses.replace(owner, status=stopped)
    assert len(of_type(decide(snapshot(owner, pods=pods)), DeletePod)) == 2


def test_a_stop_that_is_not_obeyed_ends_with_its_grace() -> None:
    owner = admitted(job(suspend=True))
    pods = (pod(owner, 0), pod(owner, 1))
    owner = dataclasses.replace(owner, status=written(decide(snapshot(owner, pods=pods, lease=lease(owner)))))
    waiting = decide(snapshot(owner, pods=pods, lease=lease(owner)))
    assert waiting.wake_at_s == NOW_S + 90
    assert written(decide(snapshot(owner, pods=pods, lease=lease(owner)), NOW_S + 90)).is_true("Suspended")


def test_a_job_that_no_layout_fits_fails_as_misconfigured_and_says_what_would_fit() -> None:
    status = written(decide(snapshot(job(replicas=5))))
    failed = status.condition("Failed")
    assert (failed.status, failed.reason) == ("True", "Misconfigured")
    assert "worker counts that fit" in failed.message


def test_a_job_that_does_not_fit_the_memory_fails_with_its_consumers_and_what_would_fit() -> None:
    workers = {"replicas": 1, "devices": 2, "hardware": "h100-80g"}
    model, training = {"preset": "kimi-vl-a3b"}, {"steps": 50, "packsPerStep": 64}
    status = written(decide(snapshot(job(model=model, training=training, workers=workers))))
    failed = status.condition("Failed")
    assert (failed.status, failed.reason) == ("True", "Misconfigured")
    assert "does not fit 2 x h100-80g" in failed.message
    assert "GiB per device of 72.0 usable: optimizer" in failed.message
    assert "would fit: dp" in failed.message


def test_a_waiting_job_says_why() -> None:
    pending = Pending(reason=Reason.WAITING_FOR_CAPACITY, message="needs 4 devices; 2 free on 1 node")
    status = written(decide(snapshot(job(), pending=pending)))
    assert status.condition("Queued").message == "needs 4 devices; 2 free on 1 node"


def test_the_deadline_ends_the_job() -> None:
    owner = admitted(job(activeDeadlineSeconds=100))
    status = written(decide(snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner))))
    assert status.condition("Failed").reason == "DeadlineExceeded"
    assert status.attempt.desired == "Stop"


def test_a_finished_job_is_deleted_by_uid_and_version_when_its_time_is_over() -> None:
    owner = admitted(job(ttlSecondsAfterFinished=60))
    told = lease(owner, step=50, outcome="Succeeded")
    owner = dataclasses.replace(owner, status=written(decide(snapshot(owner, lease=told))))
    early = decide(snapshot(owner), NOW_S + 59)
    assert (early.actions, early.wake_at_s) == ((), NOW_S + 60)
    late = decide(snapshot(owner), NOW_S + 60)
    assert late.actions == (DeleteJob(ref=owner.ref, uid=owner.uid, resource_version=owner.resource_version),)


def test_pods_of_a_failed_job_go_when_their_ranks_have_stopped() -> None:
    owner = admitted(job(activeDeadlineSeconds=100))
    pods = (pod(owner, 0), pod(owner, 1))
    owner = dataclasses.replace(owner, status=written(decide(snapshot(owner, pods=pods, lease=lease(owner)))))
    assert decide(snapshot(owner, pods=pods, lease=lease(owner))).actions == ()
    assert len(decide(snapshot(owner, pods=pods, lease=lease(owner, outcome="Stopped"))).actions) == 2


def test_jobs_of_other_managers_and_jobs_being_deleted_are_left_alone() -> None:
    assert decide(snapshot(job(managedBy="kueue.x-k8s.io/multikueue"))) == Decision()
    assert decide(snapshot(dataclasses.replace(job(), deleting=True))) == Decision()


def test_a_scale_that_does_not_fit_keeps_the_attempt_and_says_so() -> None:
    owner = dataclasses.replace(admitted(job()), plan=job(replicas=4).plan)
    seen = snapshot(
        owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner), refused="needs 2 devices; 0 free on 0 nodes"
    )
    status = written(decide(seen))
    assert status.attempt.number == 1
    assert status.condition("ResizeRefused").message == "needs 2 devices; 0 free on 0 nodes"


def test_a_finished_job_whose_pods_still_end_is_looked_at_when_the_first_of_both_times_is_over() -> None:
    owner = admitted(job(ttlSecondsAfterFinished=5))
    told = lease(owner, step=50, outcome="Succeeded")
    owner = dataclasses.replace(owner, status=written(decide(snapshot(owner, lease=told))))
    pods = (pod(owner, 0), pod(owner, 1))
    soon = decide(snapshot(owner, pods=pods)).wake_at_s
    assert soon is not None
    assert NOW_S < soon <= NOW_S + 5
