"""Containers that bring their own training: rendezvous by environment, success and failure by their pods."""

import dataclasses
import json
from typing import Any

import pytest

from polyreme_operator.reconcile import stopping, transition
from polyreme_operator.types.actions import CreateChild, CreatePod, DeletePod, WriteStatus
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView, PodPhase, PodView
from polyreme_planner.plan import Plan
from tests.unit.operator.operator_scenes import NOW_S, admitted, decide, job, lease, node, pod, snapshot, written


def torchrun(replicas: int = 2, devices: int = 4, **spec: Any) -> JobView:
    workers = {
        "replicas": replicas,
        "devices": devices,
        "runtime": {"mode": "Environment"},
        "template": {"spec": {"containers": [{"image": "mine", "command": ["torchrun", "train.py"]}]}},
    }
    return job(workers=workers, **spec)


def quiet_lease(owner: JobView) -> Any:
    return dataclasses.replace(lease(owner), record=None)


def seen_with(owner: JobView, *pods: PodView, **fields: Any) -> JobSnapshot:
    return snapshot(owner, pods=pods, lease=quiet_lease(owner), **fields)


def created(owner: JobView, *pods: PodView) -> list[dict[str, Any]]:
    actions = decide(seen_with(owner, *pods)).actions
    return [action.manifest for action in actions if isinstance(action, CreatePod)]


def variables(manifest: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in manifest["spec"]["containers"][0]["env"]}


def test_a_container_finds_its_gang_by_its_environment_alone() -> None:
    owner = admitted(torchrun(), replicas=0)
    first, second = map(variables, created(owner))
    assert {name: second[name] for name in ("RANK", "NODE_RANK", "WORLD_SIZE", "NNODES", "NPROC_PER_NODE")} == {
        "RANK": "4",
        "NODE_RANK": "1",
        "WORLD_SIZE": "8",
        "NNODES": "2",
        "NPROC_PER_NODE": "4",
    }
    assert (first["RANK"], first["NODE_RANK"]) == ("0", "0")
    assert (second["MASTER_ADDR"], second["MASTER_PORT"]) == ("j-uidj.default.svc", "29500")
    for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"):
        assert second[f"PET_{name}"] == second[name]
    assert second["POLYREME_ATTEMPT"] == "1"
    assert second["POLYREME_CHECKPOINT_URL"] == "file:///var/lib/polyreme/checkpoints/default/j"
    plan = Plan.from_json(second["POLYREME_PLAN"])
    assert owner.attempt is not None
    assert plan.hash == owner.attempt.plan_hash
    assert json.loads(second["POLYREME_PLAN"])["layout"]["dp"] == 8


def test_no_launcher_comes_into_the_container() -> None:
    container = created(admitted(torchrun(), replicas=0))[0]["spec"]["containers"][0]
    assert (container["image"], container["command"]) == ("mine", ["torchrun", "train.py"])
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm"]
    volumes = created(admitted(torchrun(), replicas=0))[0]["spec"]["volumes"]
    assert [volume["name"] for volume in volumes] == ["polyreme-memory"]
    kinds = [
        action.manifest["kind"]
        for action in decide(snapshot(admitted(torchrun(), replicas=0), children=frozenset())).actions
        if isinstance(action, CreateChild)
    ]
    assert "Service" in kinds


def test_the_attempt_runs_when_its_pods_do_with_no_word_on_the_lease() -> None:
    owner = admitted(torchrun())
    status = written(decide(seen_with(owner, pod(owner, 0), pod(owner, 1))))
    assert status.is_true("Running")
    assert status.is_true("PodsReady")
    assert status.ready_replicas == 2
    partly = written(decide(seen_with(owner, pod(owner, 0), pod(owner, 1, phase=PodPhase.PENDING))))
    assert not partly.is_true("Running")
    assert partly.ready_replicas == 1
    silent = dataclasses.replace(owner, status=status)
    assert not decide(seen_with(silent, pod(owner, 0), pod(owner, 1)), NOW_S + 90_000).actions


def test_it_succeeds_when_every_pod_did_and_waits_for_the_last() -> None:
    owner = admitted(torchrun())
    done, runs = pod(owner, 0, phase=PodPhase.SUCCEEDED, exit_code=0), pod(owner, 1)
    waiting = decide(seen_with(owner, done, runs))
    assert not any(isinstance(action, CreatePod | DeletePod) for action in waiting.actions)
    assert not written(waiting).finished
    both = (done, pod(owner, 1, phase=PodPhase.SUCCEEDED, exit_code=0))
    assert written(decide(seen_with(owner, *both))).is_true("Succeeded")


def test_a_pod_that_was_deleted_and_ended_well_has_not_succeeded() -> None:
    owner = admitted(torchrun())
    pods = [pod(owner, index, phase=PodPhase.SUCCEEDED, deleting=True, exit_code=0) for index in range(2)]
    status = written(decide(seen_with(owner, *pods)))
    assert not status.is_true("Succeeded")
    assert status.attempt is not None
    assert status.attempt.number == 2


def test_a_failed_pod_restarts_the_whole_gang_the_old_one_gone_first() -> None:
    owner = admitted(torchrun())
    pods = (pod(owner, 0), pod(owner, 1, phase=PodPhase.FAILED, exit_code=2))
    status = written(decide(seen_with(owner, *pods)))
    attempt = status.attempt
    assert attempt is not None
    assert (attempt.number, attempt.scope, attempt.replacement(0), attempt.replacement(1)) == (2, "RestartGang", 1, 1)
    assert status.restarts == 1
    after = dataclasses.replace(owner, status=status)
    assert created(after, *pods) == []
    fresh = [variables(manifest) for manifest in created(after)]
    assert [entry["POLYREME_ATTEMPT"] for entry in fresh] == ["2", "2"]


@pytest.mark.parametrize(("code", "fails"), [(42, True), (43, False)])
def test_rules_match_the_exit_code_of_the_container(code: int, fails: bool) -> None:
    rule = {"action": "Fail", "onExitCodes": {"operator": "In", "values": [42]}}
    owner = admitted(torchrun(failurePolicy={"rules": [rule]}))
    pods = (pod(owner, 0), pod(owner, 1, phase=PodPhase.FAILED, exit_code=code))
    status = written(decide(seen_with(owner, *pods)))
    failed = status.condition("Failed")
    assert (failed is not None and failed.reason == "FailurePolicy") == fails


def test_the_budget_of_restarts_holds() -> None:
    owner = admitted(torchrun(failurePolicy={"maxRestarts": 0}))
    pods = (pod(owner, 0), pod(owner, 1, phase=PodPhase.FAILED, exit_code=1))
    failed = written(decide(seen_with(owner, *pods))).condition("Failed")
    assert failed is not None
    assert failed.reason == "MaxRestartsExceeded"


def test_a_gang_that_does_not_start_is_replaced_at_its_time() -> None:
    owner = admitted(torchrun(health={"startTimeoutSeconds": 200}), at_s=NOW_S)
    pods = (pod(owner, 0), pod(owner, 1, phase=PodPhase.PENDING))
    early = decide(seen_with(owner, *pods), NOW_S + 199)
    assert early.wake_at_s == NOW_S + 200
    status = written(decide(seen_with(owner, *pods), NOW_S + 200))
    assert status.restart_records[-1].cause == "StartTimedOut"
    assert status.restart_records[-1].message == "1 of 2 pods started in 200 s"


def test_a_lost_node_moves_its_worker_and_replaces_all() -> None:
    owner = admitted(torchrun(), ("n0", "n1"))
    nodes = {"n0": node(), "n1": node("n1", out_of_service=True)}
    seen = seen_with(owner, pod(owner, 0), pod(owner, 1, where="n1"), nodes=nodes)
    assert decide(seen).reschedule


def test_a_stop_deletes_the_pods_and_waits_for_their_end() -> None:
    owner = admitted(torchrun())
    by = job("urgent")
    owner = dataclasses.replace(owner, status=transition.stop_for_preemption(owner, by, reclaim=False, now_s=NOW_S))
    pods = (pod(owner, 0), pod(owner, 1))
    asked = decide(seen_with(owner, *pods))
    assert {(action.uid, action.grace_s) for action in asked.actions if isinstance(action, DeletePod)} == {
        (entry.uid, None) for entry in pods
    }
    assert not any(isinstance(action, WriteStatus) for action in asked.actions)
    going = tuple(dataclasses.replace(entry, deleting=True) for entry in pods)
    assert decide(seen_with(owner, *going)).actions == ()
    assert not written(decide(seen_with(owner))).is_true("Admitted")
    assert not written(decide(seen_with(owner, *going), NOW_S + 60)).is_true("Admitted")


def test_a_resize_replaces_every_pod_since_each_knows_the_world() -> None:
    owner = admitted(torchrun(4, 1), ("n0",) * 4)
    status = transition.resize(seen_with(owner), ["n0", "n0"], NOW_S, plan=torchrun(2, 1).plan)
    assert status.attempt is not None
    assert [status.attempt.replacement(index) for index in range(4)] == [1, 1, 1, 1]


def test_a_success_is_no_stop_that_a_resize_may_take_for_its_own() -> None:
    owner = admitted(torchrun())
    owner = dataclasses.replace(owner, status=transition.stop_for_resize(owner, NOW_S))
    done = tuple(pod(owner, index, phase=PodPhase.SUCCEEDED, exit_code=0) for index in range(2))
    assert not stopping.has_stopped(seen_with(owner, *done), NOW_S + 999)
    assert written(decide(seen_with(owner, *done))).is_true("Succeeded")
