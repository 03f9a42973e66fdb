"""Admission, placement, moves, resizes and intents as tables."""

import dataclasses
from typing import Any

import pytest

from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.scheduler import Batch, cluster_of, schedule
from polyreme_operator.types.intents import Intents, parse_intents, render_intents
from polyreme_operator.types.queues import QueueView, Quota
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import RefusedSize
from polyreme_operator.types.views import JobView, PodPhase
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, job, lease, node, pod, why


def decide(**fields: Any) -> Batch:
    return schedule(cluster_of(**fields), NOW_S)


def test_an_admission_is_an_intent_before_it_is_a_status() -> None:
    batch = decide(jobs=(job(),), nodes=(node(),))
    assert batch.intents is not None
    (entry,) = batch.intents.entries
    (write,) = batch.writes
    assert (entry.uid, entry.attempt) == ("uid-j", 1)
    assert write.after.attempt is not None
    assert write.after.attempt.placement.node_by_index() == ["n0", "n0"]
    assert parse_intents(render_intents(batch.intents.entries)) == batch.intents.entries


def test_an_open_intent_is_cancelled_before_anything_is_admitted() -> None:
    first, second = job("a"), job("b")
    before = decide(jobs=(first,), nodes=(node(devices=2),))
    assert before.intents is not None
    intents = Intents(resource_version="1", entries=before.intents.entries)
    batch = decide(jobs=(first, second), nodes=(node(devices=2),), intents=intents)
    assert batch.intents is None
    (write,) = batch.writes
    assert write.uid == first.uid
    assert write.after.cancelled_admissions == 1
    cancelled = dataclasses.replace(first, status=write.after)
    assert decide(jobs=(cancelled,), nodes=(node(),), intents=intents).intents is not None


def test_larger_priority_goes_first_then_age() -> None:
    jobs = (
        job("young", created="2023-11-14T22:01:00Z"),
        job("old"),
        job("urgent", created="2023-11-14T22:02:00Z", priority=5),
    )
    batch = decide(jobs=jobs, nodes=(node(devices=2),))
    assert [write.uid for write in batch.writes] == ["uid-urgent"]
    assert set(why(cluster_of(jobs=jobs, nodes=(node(devices=2),)), batch)) == {"uid-old", "uid-young"}


@pytest.mark.parametrize(
    ("spec", "quota", "reason", "message"),
    [
        ({"replicas": 4}, (), "WaitingForCapacity", "needs 4 devices; room for 3 on 2 nodes"),
        (
            {"replicas": 3},
            (Quota(resource=DEVICE, nominal=2),),
            "ExceedsQuota",
            "needs 3 of polyreme.dev/device; queue default can never have more than 2",
        ),
        ({"replicas": 1, "devices": 4}, (), "Misconfigured", "a worker needs 4 polyreme.dev/device; the largest node"),
    ],
)
def test_a_waiting_job_gets_its_reason(spec: dict[str, Any], quota: Any, reason: str, message: str) -> None:
    nodes = (
        node("n0", 2),
        node("n1", 1),
        node("n2", 9, unschedulable=True) if "replicas" not in spec else node("n2", 0),
    )
    cluster = cluster_of(jobs=(job(**spec),), nodes=nodes, queues=(QueueView(name="default", quotas=quota),))
    (pending,) = why(cluster, schedule(cluster, NOW_S)).values()
    assert pending.reason == reason
    assert pending.message.startswith(message)


def test_devices_are_charged_until_the_last_pod_is_gone_orphans_included() -> None:
    gone = job("gone")
    for phase, fits in ((PodPhase.RUNNING, False), (PodPhase.SUCCEEDED, True)):
        batch = decide(jobs=(job(),), nodes=(node(devices=2),), pods=(pod(gone, 0, phase=phase),))
        assert bool(batch.writes) == fits


def test_a_worker_and_its_lingering_predecessor_are_charged_once() -> None:
    owner = admitted(job("a"))
    batch = decide(jobs=(owner, job("b")), nodes=(node(devices=4),), pods=(pod(owner, 0, deleting=True),))
    assert [write.uid for write in batch.writes] == ["uid-b"]


def test_only_the_workers_of_a_lost_node_move_in_a_new_attempt() -> None:
    owner = admitted(job(), ("n0", "n1"))
    nodes = (node(devices=1), node("n1", out_of_service=True), node("n2", 1))
    seen = {"jobs": (owner,), "nodes": nodes, "pods": (pod(owner, 0), pod(owner, 1, where="n1"))}
    (write,) = decide(**seen).writes
    attempt = write.after.attempt
    assert attempt is not None
    assert (attempt.number, attempt.placement.node_by_index()) == (2, ["n0", "n2"])
    assert (attempt.replacement(0), attempt.replacement(1)) == (0, 1)


def test_a_gang_that_lost_a_node_without_replacement_waits_in_the_queue() -> None:
    owner = admitted(job(), ("n0", "n1"))
    nodes = (node(devices=1), node("n1", out_of_service=True))
    (write,) = decide(jobs=(owner,), nodes=nodes, pods=(pod(owner, 0), pod(owner, 1, where="n1"))).writes
    assert not write.after.is_true("Admitted")
    assert write.after.is_true("Queued")
    assert write.after.attempt is not None
    assert write.after.attempt.desired == "Stop"


def test_a_lease_is_read_before_an_attempt_is_ended() -> None:
    owner = admitted(job(), ("n0", "n1"))
    nodes = (node(), node("n1", out_of_service=True), node("n2", 1))
    seen = {"jobs": (owner,), "nodes": nodes, "pods": (pod(owner, 0),), "leases": (lease(owner),)}
    batch = decide(**seen)
    assert (batch.reads, batch.writes) == (frozenset({owner.uid}), ())
    assert decide(**seen, leases_read=frozenset({owner.uid})).writes


@pytest.mark.parametrize("reserved", [False, True])
def test_a_lease_is_read_before_a_job_is_admitted_again(*, reserved: bool) -> None:
    owner, victims = admitted(job()), tuple[JobView, ...]()
    owner = dataclasses.replace(owner, status=StatusBuilder(owner, NOW_S).withdraw(Reason.PREEMPTED).build())
    if reserved:
        victim = admitted(job("victim"))
        asked = transition.stop_for_preemption(victim, owner, reclaim=False, now_s=NOW_S)
        asked = StatusBuilder(victim, NOW_S, asked).withdraw(Reason.PREEMPTED).build()
        victims = (dataclasses.replace(victim, status=asked),)
    seen = {"jobs": (owner, *victims), "nodes": (node(devices=2),)}
    assert decide(**seen, leases=(lease(owner),)).reads == {owner.uid}
    read = {"leases_read": frozenset({owner.uid})}
    assert [write.uid for write in decide(**seen, leases=(lease(owner),), **read).writes] == [owner.uid]
    succeeded = lease(owner, outcome="Succeeded")
    assert owner.uid not in {write.uid for write in decide(**seen, leases=(succeeded,), **read).writes}
    assert decide(**seen, leases=(lease(owner, outcome="Stopped"),)).reads == frozenset()


def scaled(owner: JobView, replicas: int) -> JobView:
    """The job as its user has scaled it."""
    wish = job(replicas=replicas)
    return dataclasses.replace(owner, spec=wish.spec, plans=wish.plans, generation=owner.generation + 1)


def test_a_resize_stops_the_attempt_then_begins_another_with_a_new_plan() -> None:
    owner = scaled(admitted(job()), 4)
    pods = (pod(owner, 0), pod(owner, 1))
    read = frozenset({owner.uid})
    (asked,) = decide(jobs=(owner,), nodes=(node(),), pods=pods, leases=(lease(owner),), leases_read=read).writes
    assert asked.after.attempt is not None
    assert (asked.after.attempt.number, asked.after.attempt.desired) == (1, "Stop")
    owner = dataclasses.replace(owner, status=asked.after)
    stopped = lease(owner, outcome="Stopped")
    (write,) = decide(jobs=(owner,), nodes=(node(),), pods=pods, leases=(stopped,), leases_read=read).writes
    attempt = write.after.attempt
    assert attempt is not None
    assert (attempt.number, attempt.replicas, attempt.desired) == (2, 4, "Run")
    assert attempt.plan_hash != asked.after.attempt.plan_hash
    assert attempt.replacements == []


def test_a_resize_that_does_not_fit_is_refused_and_says_why() -> None:
    owner = scaled(admitted(job()), 4)
    batch = decide(jobs=(owner,), nodes=(node(devices=3),), pods=(pod(owner, 0), pod(owner, 1)))
    assert batch.writes == ()
    assert batch.refused == {owner.uid: RefusedSize(generation=2, why="needs 2 devices; room for 1 on 1 node")}


def test_a_resumed_job_never_reuses_a_replacement_number() -> None:
    owner = admitted(job())
    owner = dataclasses.replace(
        owner, status=owner.status.model_copy(update={"conditions": [], "attempt": owner.status.attempt})
    )
    (write,) = decide(jobs=(owner,), nodes=(node(),)).writes
    assert write.after.attempt is not None
    assert [write.after.attempt.replacement(index) for index in (0, 1)] == [1, 1]
