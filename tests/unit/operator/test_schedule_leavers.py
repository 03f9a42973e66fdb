"""Pods that outlive their job's admission hold room that comes free: what waits for it is held for the head."""

import pytest

from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.types.queues import QueueView, Quota
from polyreme_operator.types.views import ENDS_WITHIN_S
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, job, node, pod, why
from tests.unit.operator.test_scheduling_cycles import admitted_uids, asked_to_make_way, gone, running, stopped_uids

EARLIER = "2023-11-14T21:00:00Z"


@pytest.mark.parametrize("known", [False, True], ids=["deleted", "evicted"])
def test_no_job_passes_the_head_while_old_pods_end(known: bool) -> None:
    past = job("past", replicas=3)
    pods = tuple(pod(past, index, deleting=True) for index in range(3))
    head, behind = job("head", replicas=4, created=EARLIER), job("behind", replicas=1)
    jobs = (head, behind, *([past] if known else []))
    cluster = cluster_of(jobs=jobs, nodes=(node(devices=4),), pods=pods)
    batch = schedule(cluster, NOW_S)
    assert admitted_uids(batch) == set()
    assert why(cluster, batch)["uid-behind"].reason == "BehindOthers"


def test_no_more_victims_are_asked_than_are_needed_beside_what_ends_anyway() -> None:
    past = job("past", replicas=2)
    pods = tuple(pod(past, index, deleting=True) for index in range(2))
    high = job("high", replicas=2, priority=5)
    cluster = cluster_of(jobs=(running("low"), high), nodes=(node(devices=4),), pods=pods)
    batch = schedule(cluster, NOW_S)
    assert stopped_uids(batch) == set()
    assert why(cluster, batch)["uid-high"].message == "waits for default/past to stop"


def test_a_victim_gets_its_pending_reason_once_its_preemptor_starts() -> None:
    high = job("high", replicas=2, priority=5)
    victim = gone(asked_to_make_way("low", high))
    cluster = cluster_of(jobs=(victim, high), nodes=(node(devices=2),))
    batch = schedule(cluster, NOW_S)
    assert admitted_uids(batch) == {"uid-high"}
    assert why(cluster, batch)["uid-low"].reason == "WaitingForCapacity"


@pytest.mark.parametrize("quota", [None, 4], ids=["for the nodes", "for the quota, too"])
def test_free_nodes_next_to_victims_are_held_for_the_preemptor(quota: int | None) -> None:
    jobs = (running("low"), job("high", replicas=4, priority=5), job("mid", replicas=2, priority=2))
    quotas = () if quota is None else (Quota(resource=DEVICE, nominal=quota),)
    queues = (QueueView(name="default", quotas=quotas),)
    batch = schedule(cluster_of(jobs=jobs, queues=queues, nodes=(node("n0", devices=2), node("n1", devices=2))), NOW_S)
    assert stopped_uids(batch) == {"uid-low"}
    assert admitted_uids(batch) == set()


@pytest.mark.parametrize("asked", [True, False], ids=["asked before", "asked in this round"])
@pytest.mark.parametrize(("nominal", "fits"), [(9, True), (8, False)])
def test_quota_is_held_once_for_a_head_that_others_make_way_for(asked: bool, nominal: int, fits: bool) -> None:
    """Beside those that stop and the head that follows them, one more device is what a quota of nine leaves."""
    high = job("high", replicas=4, priority=5)
    places = ("n0",) * 4
    low = asked_to_make_way("low", high, places) if asked else running("low", places)
    nodes = (node("n0", devices=4), node("n1", devices=1))
    queue = QueueView(name="default", quotas=(Quota(resource=DEVICE, nominal=nominal),))
    pods = tuple(pod(low, index) for index in range(4))
    cluster = cluster_of(jobs=(low, high, job("small", replicas=1)), nodes=nodes, pods=pods, queues=(queue,))
    batch = schedule(cluster, NOW_S)
    assert why(cluster, batch)["uid-high"].reason == "WaitingForPreemption"
    assert admitted_uids(batch) == ({"uid-small"} if fits else set())


@pytest.mark.parametrize("deleted", [False, True])
def test_a_preemptor_seeks_other_victims_when_pods_never_end(deleted: bool) -> None:
    """A process that no signal ends keeps its pod for good, and so its devices: others are asked for theirs."""
    high = job("high", replicas=2, priority=5)
    stuck = gone(asked_to_make_way("stuck", high))
    pods = tuple(pod(stuck, index, deleting=True, ends_by_s=NOW_S) for index in range(2))
    jobs = (high, running("low", ("n1", "n1")), *([] if deleted else [stuck]))
    cluster = cluster_of(jobs=jobs, nodes=(node("n0", devices=2), node("n1", devices=2)), pods=pods)
    waits = schedule(cluster, NOW_S + ENDS_WITHIN_S - 1)
    assert stopped_uids(waits) == set()
    assert why(cluster, waits)["uid-high"].reason == "WaitingForPreemption"
    assert waits.wake_at_s == NOW_S + ENDS_WITHIN_S
    looks = schedule(cluster, NOW_S + ENDS_WITHIN_S)
    assert stopped_uids(looks) == {"uid-low"}
    assert looks.wake_at_s is None
