"""Rounds that join queue, placement, preemption and elasticity, as tables."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.times import rfc3339
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.reconcile.transition import stop_for_preemption, stop_for_resize
from polyreme_operator.scheduler import Batch, ClusterSnapshot, Limits, cluster_of, schedule
from polyreme_operator.types.inventory import LevelView
from polyreme_operator.types.queues import QueueView, Quota, StopPolicy
from polyreme_operator.types.views import ForeignPod, JobView, NodeView
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, job, node, pod, why
from tests.unit.operator.queue_scenes import GPU, queue

LONG_AGO_S = NOW_S - 10_000
RACKS = (LevelView(name="rack", node_label="rack"),)


def in_rack(name: str, rack: str, devices: int = 2) -> NodeView:
    return node(name, devices, labels=(("rack", rack),))


def admitted_uids(batch: Batch) -> set[str]:
    return {write.uid for write in batch.writes if write.after.is_true("Admitted") and not _stops(write.after)}


def only(batch: Batch) -> Any:
    (write,) = batch.writes
    return write


def stopped_uids(batch: Batch) -> set[str]:
    return {write.uid for write in batch.writes if _stops(write.after)}


def _stops(status: Any) -> bool:
    return status.attempt is not None and status.attempt.desired == "Stop"


def reason(cluster: ClusterSnapshot, batch: Batch, uid: str) -> str:
    return why(cluster, batch)[uid].reason


def running(name: str, nodes: tuple[str, ...] = ("n0", "n0"), **spec: Any) -> JobView:
    return admitted(job(name, replicas=len(nodes), **spec), nodes, at_s=LONG_AGO_S)


def test_others_make_way_for_a_larger_priority_and_checkpoint_first() -> None:
    cluster = cluster_of(jobs=(running("low"), job("high", priority=5)), nodes=(node(devices=2),))
    batch = schedule(cluster, NOW_S)
    write = only(batch)
    assert (write.uid, write.after.attempt.desired, write.after.attempt.checkpoint_requested) == (
        "uid-low",
        "Stop",
        True,
    )
    assert write.after.preemption.by == "uid-high"
    assert batch.intents is None
    assert reason(cluster, batch, "uid-high") == "WaitingForPreemption"
    assert "default/low" in why(cluster, batch)["uid-high"].message


def test_preemption_spares_new_jobs_equals_and_obeys_policy_never() -> None:
    for low, high in (
        (admitted(job("low"), at_s=NOW_S - 5), {"priority": 5}),
        (running("low"), {"priority": 5, "preemptionPolicy": "Never"}),
        (running("low"), {"priority": 0}),
        (running("low", minRuntimeSeconds=20_000), {"priority": 5}),
    ):
        batch = schedule(cluster_of(jobs=(low, job("high", **high)), nodes=(node(devices=2),)), NOW_S)
        assert batch.writes == ()


def asked_to_make_way(name: str, by: JobView, nodes: tuple[str, ...] = ("n0", "n0")) -> JobView:
    victim = running(name, nodes)
    return dataclasses.replace(victim, status=stop_for_preemption(victim, by, reclaim=False, now_s=NOW_S - 1))


def gone(victim: JobView) -> JobView:
    """It has stopped: no admission any more, and the request stays until it is admitted again."""
    conditions = [each for each in victim.status.conditions if each.type != "Admitted"]
    return dataclasses.replace(victim, status=victim.status.model_copy(update={"conditions": conditions}))


def test_freed_nodes_are_held_for_the_preemptor_without_a_second_victim() -> None:
    high, small = job("high", replicas=4, priority=5), job("small", replicas=1, priority=4)
    victim = asked_to_make_way("low", high)
    free = cluster_of(jobs=(victim, high, small), nodes=(node(devices=2), node("n1", 1)), pods=(pod(victim, 0),))
    batch = schedule(free, NOW_S)
    assert stopped_uids(batch) == set()
    assert reason(free, batch, "uid-high") == "WaitingForPreemption"
    after = cluster_of(jobs=(gone(victim), high, small), nodes=(node(devices=2), node("n1", 2)))
    batch = schedule(after, NOW_S)
    assert admitted_uids(batch) == {"uid-high"}
    assert reason(after, batch, "uid-low") == "WaitingForCapacity"


def test_a_preemptor_whose_room_was_lost_does_not_hold_what_is_left() -> None:
    high = job("high", replicas=4, priority=5)
    victim = gone(asked_to_make_way("low", high, ("n0", "n1")))
    small = job("small", replicas=1, priority=9)
    cluster = cluster_of(jobs=(victim, high, small), nodes=(node(devices=2),))
    assert admitted_uids(schedule(cluster, NOW_S)) == {"uid-small"}


def test_quota_that_is_held_for_a_lesser_preemptor_keeps_no_greater_one_waiting() -> None:
    """Others were preempted for both; each needs all of the quota."""
    lesser, greater = job("lesser", replicas=4, priority=3), job("greater", replicas=4, priority=5)
    left = gone(asked_to_make_way("first", lesser))
    right = gone(asked_to_make_way("second", greater, ("n1", "n1")))
    queue = QueueView(name="default", quotas=(Quota(resource=DEVICE, nominal=4),))
    jobs, nodes = (left, right, lesser, greater), (node(devices=2), node("n1", 2))
    cluster = cluster_of(jobs=jobs, nodes=nodes, queues=(queue,))
    assert admitted_uids(schedule(cluster, NOW_S)) == {"uid-greater"}


def test_what_was_made_free_for_a_job_is_held_for_one_start_and_not_for_the_next() -> None:
    high, top = job("high", replicas=2, priority=5), job("top", replicas=2, priority=9)
    victim = gone(asked_to_make_way("low", high))
    evicted = gone(admitted(high, at_s=NOW_S))
    cluster = cluster_of(jobs=(victim, evicted, top), nodes=(node(devices=2),))
    assert admitted_uids(schedule(cluster, NOW_S)) == {"uid-top"}


def test_a_job_behind_the_head_goes_round_what_is_held_for_it() -> None:
    head = job("head", replicas=3, created="2023-11-14T21:00:00Z")
    specs: tuple[tuple[dict[str, Any], bool], ...] = (
        ({}, False),
        ({"priority": -1}, True),
        ({"activeDeadlineSeconds": 60}, False),
    )
    for spec, fits in specs:
        behind = job("behind", replicas=1, **spec)
        cluster = cluster_of(jobs=(running("runs"), head, behind), nodes=(node(devices=4),))
        batch = schedule(cluster, NOW_S)
        assert (admitted_uids(batch) == {"uid-behind"}) == fits, spec
        if not fits:
            assert reason(cluster, batch, "uid-behind") == "BehindOthers"


def test_a_job_that_can_never_run_blocks_no_other() -> None:
    head = job("head", replicas=10, created="2023-11-14T21:00:00Z")
    cluster = cluster_of(jobs=(head, job("behind", replicas=1)), nodes=(node(devices=4),))
    assert admitted_uids(schedule(cluster, NOW_S)) == {"uid-behind"}


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        ((), "QueueMissing"),
        ((QueueView(name="team", parent="gone"),), "QueueMissing"),
        ((QueueView(name="team", stop_policy=StopPolicy.HOLD),), "QueueStopped"),
        ((QueueView(name="team", quotas=(Quota(resource=DEVICE, nominal=1),)),), "ExceedsQuota"),
        ((QueueView(name="team", quotas=(Quota(resource=DEVICE, nominal=2),)),), None),
    ],
)
def test_a_queue_says_whether_its_jobs_may_start(queues: tuple[QueueView, ...], expected: str | None) -> None:
    cluster = cluster_of(jobs=(job(queueName="team"),), nodes=(node(),), queues=queues)
    batch = schedule(cluster, NOW_S)
    if expected is None:
        assert admitted_uids(batch) == {"uid-j"}
    else:
        assert (batch.writes, reason(cluster, batch, "uid-j")) == ((), expected)


def test_exceeding_a_quota_for_good_has_its_own_reason_and_blocks_no_other_job() -> None:
    queues = (queue("top", 1), queue("team", 3, "top"), queue("small", 1, "top", borrow=1))
    scarce = tuple(
        dataclasses.replace(each, quotas=(dataclasses.replace(each.quotas[0], resource=DEVICE),)) for each in queues
    )
    head = job("head", replicas=4, queueName="small", created="2023-11-14T21:00:00Z")
    cluster = cluster_of(
        jobs=(head, job("behind", replicas=2, queueName="small")), nodes=(node(devices=9),), queues=scarce
    )
    batch = schedule(cluster, NOW_S)
    assert admitted_uids(batch) == {"uid-behind"}
    found = batch.kinds[cluster.waiting["uid-head"].kind]
    assert (found.reason, found.permanent) == ("ExceedsQuota", True)
    assert found.message == (
        f"needs 4 of {DEVICE}; queue small can never have more than 2: "
        "change workers.replicas, spec.queueName or the quota"
    )


def test_a_root_that_is_over_its_lowered_quota_borrows_nothing() -> None:
    tree = QueueTree.of([queue("top", 1), queue("team", 1, "top")])
    ledger = QuotaLedger(tree, {("top", GPU): 1, ("team", GPU): 2})
    assert (ledger.over("top", GPU), ledger.borrowed("top", GPU), ledger.borrowed("team", GPU)) == (1, 0, 1)


def test_a_draining_queue_asks_what_runs_to_checkpoint_and_stop() -> None:
    queue = QueueView(name="default", stop_policy=StopPolicy.HOLD_AND_DRAIN)
    batch = schedule(cluster_of(jobs=(running("runs"),), nodes=(node(),), queues=(queue,)), NOW_S)
    assert stopped_uids(batch) == {"uid-runs"}
    stopping = dataclasses.replace(running("runs"), status=batch.writes[0].after)
    assert schedule(cluster_of(jobs=(stopping,), nodes=(node(),), queues=(queue,)), NOW_S).writes == ()


def test_selectors_taints_and_foreign_pods_leave_less_room() -> None:
    picky = job(workers={"replicas": 2, "template": {"spec": {"nodeSelector": {"zone": "b"}}}})
    cluster = cluster_of(jobs=(picky,), nodes=(node(), node("n1", labels=(("zone", "b"),))))
    write = only(schedule(cluster, NOW_S))
    assert write.after.attempt.placement.node_by_index() == ["n1", "n1"]
    taken = ForeignPod(node="n1", requests=((DEVICE, 3),))
    cluster = cluster_of(jobs=(picky,), nodes=(node(), node("n1", labels=(("zone", "b"),))), foreign=(taken,))
    assert schedule(cluster, NOW_S).writes == ()


def test_an_exclusive_rack_is_not_shared() -> None:
    alone = running("alone", ("a0", "a0"), topology={"exclusive": "rack"})
    nodes = (in_rack("a0", "a", 4), in_rack("a1", "a", 4), in_rack("b0", "b", 1))
    cluster = cluster_of(jobs=(alone, job("j", replicas=1), job("k", replicas=2)), nodes=nodes, levels=RACKS)
    batch = schedule(cluster, NOW_S)
    write = only(batch)
    assert (write.uid, write.after.attempt.placement.node_by_index()) == ("uid-j", ["b0"])


def test_a_gang_that_lost_a_node_stays_in_its_rack_or_goes_as_a_whole() -> None:
    owner = running("owner", ("a0", "a1"), topology={"required": "rack"})
    lost = dataclasses.replace(in_rack("a1", "a"), out_of_service=True)
    for spare, placed in (("a", ["a0", "c0"]), ("b", None)):
        nodes = (in_rack("a0", "a", 1), lost, in_rack("c0", spare))
        batch = schedule(cluster_of(jobs=(owner,), nodes=nodes, pods=(pod(owner, 0, where="a0"),), levels=RACKS), NOW_S)
        write = only(batch)
        assert write.after.is_true("Admitted") == (placed is not None)
        if placed is not None:
            assert write.after.attempt.placement.node_by_index() == placed


def tight_rack_elsewhere(*stay: str, free: int = 2) -> tuple[NodeView, ...]:
    """Rack b has the tightest room for one worker; rack a, where the others stay, has more."""
    return (*(in_rack(name, "a", 1) for name in stay), in_rack("a8", "a", free), in_rack("b0", "b", 1))


@pytest.mark.parametrize(("free", "place"), [(2, "a8"), (0, "b0")])
def test_a_replacement_goes_near_the_workers_that_stay_if_there_is_room(free: int, place: str) -> None:
    owner = running("owner", ("a0", "a1"))
    nodes = (*tight_rack_elsewhere("a0", free=free), dataclasses.replace(in_rack("a1", "a"), out_of_service=True))
    cluster = cluster_of(jobs=(owner,), nodes=nodes, pods=(pod(owner, 0, where="a0"),), levels=RACKS)
    assert only(schedule(cluster, NOW_S)).after.attempt.placement.node_by_index() == ["a0", place]


def test_workers_that_join_are_placed_near_the_others() -> None:
    owner = running("owner", ("a0", "a1"))
    wish = job("owner", replicas=3)
    owner = dataclasses.replace(
        owner, spec=wish.spec, plans=wish.plans, generation=owner.generation + 1, status=stop_for_resize(owner, NOW_S)
    )
    cluster = cluster_of(jobs=(owner,), nodes=tight_rack_elsewhere("a0", "a1"), levels=RACKS)
    assert only(schedule(cluster, NOW_S)).after.attempt.placement.node_by_index() == ["a0", "a1", "a8"]


def test_an_elastic_job_starts_smaller_rather_than_wait() -> None:
    elastic = job(workers={"replicas": 4, "minReplicas": 2})
    write = only(schedule(cluster_of(jobs=(elastic,), nodes=(node(devices=3),)), NOW_S))
    assert write.after.attempt.replicas in {2, 3}
    assert schedule(cluster_of(jobs=(job(workers={"replicas": 4}),), nodes=(node(devices=3),)), NOW_S).writes == ()


def test_a_round_ends_at_its_bounds_and_asks_for_another() -> None:
    jobs = tuple(job(f"j{at}", replicas=1) for at in range(5))
    batch = schedule(cluster_of(jobs=jobs, nodes=(node(devices=8),)), NOW_S, limits=Limits(admissions_max=2))
    assert (len(batch.writes), batch.again) == (2, True)
    assert not schedule(cluster_of(jobs=jobs, nodes=(node(devices=8),)), NOW_S).again


def test_a_class_that_did_not_fit_is_not_placed_again_before_something_comes_free() -> None:
    cluster = cluster_of(jobs=(job("a"), job("b")), nodes=(node(devices=1),))
    batch = schedule(cluster, NOW_S)
    (kind,) = batch.kinds
    larger = cluster_of(jobs=(job("a"), job("b")), nodes=(node(devices=4),))
    known = dataclasses.replace(larger, refused={kind: batch.kinds[kind]})
    assert schedule(known, NOW_S).writes == ()
    assert len(schedule(larger, NOW_S).writes) == 2


@pytest.mark.parametrize(("saved_lately", "other"), [("a", "b"), ("b", "a")])
def test_times_of_a_victim_come_from_its_durable_checkpoint(saved_lately: str, other: str) -> None:
    """Of two victims the one that has saved later loses less, whatever their names."""
    fresh, stale = running(saved_lately, ("n0",)), running(other, ("n1",))
    saved = {"name": "a000001-s00000010", "attempt": 1, "step": 10, "at": rfc3339(NOW_S - 10)}
    status = type(fresh.status).model_validate(
        {**fresh.status.model_dump(mode="json", by_alias=True, exclude_none=True), "lastCheckpoint": saved}
    )
    jobs = (dataclasses.replace(fresh, status=status), stale, job("high", replicas=1, priority=1))
    batch = schedule(cluster_of(jobs=jobs, nodes=(node("n0", 1), node("n1", 1))), NOW_S)
    assert stopped_uids(batch) == {f"uid-{saved_lately}"}


def test_a_draining_queue_leaves_the_jobs_of_others_alone() -> None:
    queues = (QueueView(name="default"), QueueView(name="team", stop_policy=StopPolicy.HOLD_AND_DRAIN))
    jobs = (running("runs"), running("drains", queueName="team"))
    assert stopped_uids(schedule(cluster_of(jobs=jobs, nodes=(node(),), queues=queues), NOW_S)) == {"uid-drains"}


def test_a_held_jobs_reason_names_the_ancestor_that_holds() -> None:
    queues = (QueueView(name="top", stop_policy=StopPolicy.HOLD), QueueView(name="team", parent="top"))
    cluster = cluster_of(jobs=(job(queueName="team"),), nodes=(node(),), queues=queues)
    said = why(cluster, schedule(cluster, NOW_S))["uid-j"].message
    assert said == "queue top admits nothing: its stopPolicy is Hold"
