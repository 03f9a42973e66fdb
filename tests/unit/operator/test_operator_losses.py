"""Pods that others take away, and pods that no scheduler finds room for: the gang recovers, no budget pays."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.job.status import RestartRecord
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile.failure_policy import Restart, judge
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.observe import UNSCHEDULABLE_S
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import CreatePod, Decision, DeletePod, WriteStatus
from polyreme_operator.types.inventory import Taint
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView, PodPhase
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, node, pod, snapshot

EVICTED = (("DisruptionTarget", "True"),)


def verdict_of(seen: JobSnapshot, now_s: float = NOW_S) -> Restart:
    assert seen.job.spec is not None
    verdict = judge(seen, seen.job.spec, now_s)
    assert isinstance(verdict, Restart)
    return verdict


def decide(seen: JobSnapshot) -> Decision:
    return reconcile(seen, NOW_S, defaults=PodDefaults())


def refused(owner: JobView, *, for_s: float) -> JobSnapshot:
    pending = pod(
        owner,
        1,
        where="",
        phase=PodPhase.PENDING,
        unschedulable_since_s=NOW_S - for_s,
        unschedulable="0/2 nodes are available: insufficient memory",
    )
    return snapshot(owner, pods=(pod(owner, 0), pending), lease=lease(owner, released=False))


def test_a_worker_that_no_scheduler_finds_room_for_moves_at_no_cost() -> None:
    owner = admitted(job(failurePolicy={"maxRestarts": 0}), ("n0", "n1"))
    verdict = verdict_of(refused(owner, for_s=UNSCHEDULABLE_S))
    assert (verdict.failure.cause, verdict.record.counts, verdict.scope) == ("Unschedulable", False, "RestartPod")
    assert verdict.move == verdict.replace == {1}
    assert "n1" in verdict.failure.message
    assert "insufficient memory" in verdict.failure.message
    assert decide(refused(owner, for_s=UNSCHEDULABLE_S)).reschedule


def test_an_ending_attempt_gets_no_new_pod_when_its_lease_is_gone() -> None:
    owner = admitted(job(), ("n0", "n1"))
    update = {"retry_at": rfc3339(NOW_S + 5), "replicas": 1}
    owner = dataclasses.replace(owner, status=owner.status.model_copy(update=update))
    seen = snapshot(owner, pods=(pod(owner, 0),), lease=lease(owner, released=False))
    verdict = verdict_of(seen)
    assert (str(verdict.failure.cause), verdict.due_s) == ("PodLost", NOW_S + 5)
    assert verdict.replace == {1}
    assert not [one for one in decide(seen).actions if isinstance(one, CreatePod)]
    fresh = dataclasses.replace(owner, status=owner.status.model_copy(update={"retry_at": None}))
    created = [one.index for one in decide(dataclasses.replace(seen, job=fresh)).actions if isinstance(one, CreatePod)]
    assert created == [1]


def test_a_scheduler_is_given_some_seconds_and_then_looked_at_again() -> None:
    owner = admitted(job(), ("n0", "n1"))
    decision = decide(refused(owner, for_s=4))
    assert not decision.reschedule
    assert decision.wake_at_s == NOW_S + UNSCHEDULABLE_S - 4
    bound = dataclasses.replace(refused(owner, for_s=99).pods[1], node="n1")
    seen = dataclasses.replace(refused(owner, for_s=99), pods=(pod(owner, 0), bound))
    assert not decide(seen).reschedule


def test_moves_after_the_third_wait_longer_each_time_and_none_ends_the_job() -> None:
    owner = admitted(job(failurePolicy={"noProgressMax": 1, "maxRestarts": 0}), ("n0", "n1"))
    records = [
        RestartRecord(attempt=n, at=rfc3339(NOW_S), cause="Unschedulable", scope="RestartPod", counts=False)
        for n in range(1, 6)
    ]
    waits = []
    for count in range(6):
        status = owner.status.model_copy(update={"restart_records": records[:count]})
        seen = refused(dataclasses.replace(owner, status=status), for_s=UNSCHEDULABLE_S)
        waits.append(verdict_of(seen).due_s - NOW_S)
    assert waits == [0, 0, 0, 40, 80, 160]


@pytest.mark.parametrize(
    "fields", [{"deleting": True, "conditions": EVICTED}, {"phase": PodPhase.FAILED, "conditions": EVICTED}]
)
def test_an_eviction_by_others_is_no_fault_of_the_job(fields: dict[str, Any]) -> None:
    owner = admitted(job(failurePolicy={"maxRestarts": 0}))
    verdict = verdict_of(snapshot(owner, pods=(pod(owner, 0), pod(owner, 1, **fields)), lease=lease(owner, step=3)))
    assert (verdict.failure.cause, verdict.record.counts) == ("Evicted", False)
    assert (verdict.replace, verdict.move) == (frozenset({1}), frozenset())


def test_a_failure_next_to_an_eviction_is_reported_and_counted() -> None:
    owner = admitted(job())
    pods = (pod(owner, 0, deleting=True, conditions=EVICTED), pod(owner, 1, phase=PodPhase.FAILED, exit_code=3))
    verdict = verdict_of(snapshot(owner, pods=pods, lease=lease(owner, step=3)))
    assert (verdict.failure.cause, verdict.failure.index, verdict.record.counts) == ("PodFailed", 1, True)
    assert verdict.replace == {0, 1}


def test_what_leaves_a_cordoned_node_goes_elsewhere_and_what_runs_there_stays() -> None:
    owner = admitted(job(), ("n0", "n1"))
    nodes = {"n0": node(unschedulable=True), "n1": node("n1", unschedulable=True)}
    pods = (pod(owner, 0), pod(owner, 1, where="n1", deleting=True, conditions=EVICTED))
    verdict = verdict_of(snapshot(owner, pods=pods, nodes=nodes, lease=lease(owner, step=3)))
    assert verdict.move == verdict.replace == {1}


@pytest.mark.parametrize(("effect", "moves"), [("NoExecute", True), ("NoSchedule", True), ("PreferNoSchedule", False)])
def test_what_leaves_a_node_that_is_tainted_since_goes_elsewhere(effect: str, moves: bool) -> None:
    owner = admitted(job(), ("n0", "n1"))
    nodes = {"n0": node(), "n1": node("n1", taints=(Taint(key="broken", effect=effect),))}
    pods = (pod(owner, 0), pod(owner, 1, where="n1", deleting=True, conditions=EVICTED))
    verdict = verdict_of(snapshot(owner, pods=pods, nodes=nodes, lease=lease(owner, step=3)))
    assert verdict.replace == {1}
    assert verdict.move == (verdict.replace if moves else set())


def test_what_tolerates_the_taint_comes_back() -> None:
    template = {"spec": {"tolerations": [{"key": "broken", "operator": "Exists"}]}}
    owner = admitted(job(workers={"replicas": 2, "template": template}), ("n0", "n1"))
    nodes = {"n0": node(), "n1": node("n1", taints=(Taint(key="broken", effect="NoExecute"),))}
    pods = (pod(owner, 0), pod(owner, 1, where="n1", deleting=True, conditions=EVICTED))
    assert not verdict_of(snapshot(owner, pods=pods, nodes=nodes, lease=lease(owner, step=3))).move


def test_a_deleted_pod_is_replaced_only_when_it_is_gone() -> None:
    owner = admitted(job())
    going = (pod(owner, 0), pod(owner, 1, deleting=True))
    (write,) = (
        action
        for action in decide(snapshot(owner, pods=going, lease=lease(owner, step=3))).actions
        if isinstance(action, WriteStatus)
    )
    after = dataclasses.replace(owner, status=write.after)
    assert after.attempt is not None
    assert (after.attempt.number, after.attempt.replacement(1)) == (2, 1)
    stuck = decide(snapshot(after, pods=going, lease=lease(after, attempt=2, released=False)))
    assert not any(isinstance(action, CreatePod | DeletePod) for action in stuck.actions)
    lost = {"n0": node(ready=False, not_ready_since_s=NOW_S - 999)}
    forced = decide(snapshot(after, pods=going, nodes=lost, lease=lease(after, attempt=2, released=False)))
    assert not any(isinstance(action, CreatePod) for action in forced.actions)
    gone = decide(snapshot(after, pods=going[:1], lease=lease(after, attempt=2, released=False)))
    assert [type(action) for action in gone.actions if isinstance(action, CreatePod)] == [CreatePod]
