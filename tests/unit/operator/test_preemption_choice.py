"""Whom a waiting gang may displace, and whom it chooses."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from polyreme_api.job.workers import Topology
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler.preemption.policy import QuotaTrial
from polyreme_operator.scheduler.preemption.search import Victims, choose_victims
from polyreme_operator.types.inventory import GangRequest
from polyreme_operator.types.queues import QueueView, Quota, Reclaim, Running, Waiting
from tests.unit.operator.queue_scenes import GPU, inventory, queue, running, used_by, waiting

NOW_S = 10_000.0
RACK = Topology(required="rack")
ONE = (queue("a", 100),)


def choose(
    racks: list[int],
    jobs: list[Running],
    *,
    queues: tuple[QueueView, ...] = ONE,
    preemptor: Waiting | None = None,
    topology: Topology = RACK,
    devices: int = 1,
    **options: Any,
) -> Victims | None:
    job = preemptor or waiting("p", workers=2, priority=5)
    request = GangRequest(workers=job.workers, devices=1, requests=job.requests, topology=topology)
    nodes = inventory(racks, devices=devices, jobs=jobs)
    tree = QueueTree.of(queues)
    ledger = QuotaLedger(tree, used_by(jobs))
    return choose_victims(nodes, request, job, jobs, tree=tree, ledger=ledger, now_s=NOW_S, **options)


def old(uid: str, rows: list[int], *, lost_s: float = 1000.0, where: str = "a", **fields: Any) -> Running:
    return running(uid, where, rows, started_s=NOW_S - lost_s, **fields)


def test_the_cheapest_domain_to_clear_is_cleared_and_not_the_cheapest_jobs() -> None:
    jobs = [
        old("x", [0], lost_s=10),
        old("y", [1], lost_s=9000),
        old("z", [2, 3], lost_s=100),
        old("w", [4], lost_s=20),
    ]
    found = choose([2, 2, 1], jobs)
    assert found is not None
    assert (found.uids, found.domain, found.level, found.cost_device_s) == (("z",), "r1", "rack", 200.0)
    assert found.message == "preempting ns/z in r1: 200 device-seconds since the last checkpoints"
    assert found.reclaim == frozenset()


def test_of_nodes_that_many_jobs_share_the_cheapest_to_clear_is_cleared() -> None:
    """Ten jobs, connected by the nodes that they share: too many to try all sets, or to free nodes one by one."""
    held = {
        "a": ([1, 3], 40),
        "b": ([2, 3], 890),
        "c": ([1], 220),
        "d": ([1, 2, 4], 650),
        "e": ([0, 2], 170),
        "f": ([4, 5], 920),
        "g": ([0, 3], 20),
        "h": ([0], 660),
        "i": ([4, 5], 100),
        "j": ([5], 130),
    }
    jobs = [old(uid, rows, lost_s=lost_s) for uid, (rows, lost_s) in held.items()]
    found = choose([6], jobs, devices=3, preemptor=waiting("p", workers=1, devices=3, priority=5))
    assert found is not None
    assert (found.uids, found.cost_device_s) == (("e", "g", "h"), 1040.0)


def test_a_checkpoint_makes_a_large_gang_cheaper_than_a_small_one() -> None:
    jobs = [old("large", [0, 1, 2, 3], lost_s=1), old("small", [4, 5], lost_s=3600)]
    found = choose([4, 2], jobs)
    assert found is not None
    assert found.uids == ("large",)


def test_what_stops_already_is_waited_for() -> None:
    found = choose([2, 2], [old("x", [0, 1]), old("y", [2, 3], stopping=True)])
    assert found is not None
    assert (found.uids, found.domain, found.cost_device_s) == ((), "r1", 0.0)
    assert found.message == "waits for ns/y to stop in r1"


def test_what_stops_for_another_comes_free_for_that_one_alone() -> None:
    jobs = [old("x", [0, 1]), old("y", [2, 3], stopping=True, stopping_for="other")]
    found = choose([2, 2], jobs)
    assert found is not None
    assert found.uids == ("x",)
    mine = [jobs[0], dataclasses.replace(jobs[1], stopping_for="p")]
    assert (found := choose([2, 2], mine)) is not None
    assert found.uids == ()


@pytest.mark.parametrize(
    ("fields", "spared"),
    [
        ({}, False),
        ({"priority": 5}, True),
        ({"priority": 4}, False),
        ({"preempted_for": frozenset({"p"})}, True),
        ({"preempted_for": frozenset({"other"})}, False),
        ({"min_runtime_s": NOW_S + 1}, True),
        ({"min_runtime_s": NOW_S - 1}, False),
        ({"admitted_s": NOW_S - 59}, True),
        ({"admitted_s": NOW_S - 60}, False),
        ({"preempted_at_s": (NOW_S - 59,)}, True),
        ({"preempted_at_s": (NOW_S - 300, NOW_S - 200, NOW_S - 100)}, True),
        ({"preempted_at_s": (NOW_S - 200, NOW_S - 100)}, False),
        ({"preempted_at_s": (NOW_S - 3601, NOW_S - 200, NOW_S - 100)}, False),
        ({"where": "b"}, True),
    ],
)
def test_some_are_left_alone(fields: Any, spared: bool) -> None:
    queues = (queue("a", 100, preemption_window_s=3600.0), queue("b", 100))
    found = choose([2], [old("x", [0, 1], **fields)], queues=queues)
    assert (found is None) == spared


def test_the_queue_gives_a_least_runtime_to_all_its_jobs() -> None:
    assert choose([2], [old("x", [0, 1])], queues=(queue("a", 100, min_runtime_s=NOW_S + 1),)) is None


def test_a_job_that_must_not_preempt_has_no_victims() -> None:
    assert choose([2], [old("x", [0, 1])], preemptor=waiting("p", workers=2, priority=5, may_preempt=False)) is None
    never = (queue("a", 100, within_queue=Reclaim.NEVER),)
    assert choose([2], [old("x", [0, 1])], queues=never) is None


def test_the_default_queue_need_not_exist() -> None:
    found = choose(
        [2], [old("x", [0, 1], where="default")], queues=(), preemptor=waiting("p", "default", workers=2, priority=1)
    )
    assert found is not None
    assert found.uids == ("x",)


def test_a_queue_that_is_not_in_order_has_no_victims() -> None:
    assert choose([2], [old("x", [0, 1])], queues=(queue("a", 100, "gone"),)) is None


BORROWED = (queue("a", 2, "top"), queue("b", 2, "top"), queue("top"))


def test_borrowed_quota_is_taken_back_whatever_its_priority() -> None:
    jobs = [old("x", [0], where="b", priority=9), old("y", [1], where="b"), old("z", [2, 3], where="b")]
    found = choose([2, 2], jobs, queues=BORROWED)
    assert found is not None
    assert (found.uids, found.reclaim) == (("x", "y"), frozenset({"x", "y"}))
    lower = (queue("a", 2, "top", reclaim=Reclaim.LOWER_PRIORITY), *BORROWED[1:])
    assert (found := choose([2, 2], jobs, queues=lower)) is not None
    assert found.uids == ("z",)
    assert choose([2, 2], jobs, queues=(queue("a", 2, "top", reclaim=Reclaim.NEVER), *BORROWED[1:])) is None


def test_reclaim_leaves_each_queue_its_nominal_quota() -> None:
    jobs = [old("x", [0], where="b"), old("y", [1], where="b")]
    assert choose([2], jobs, queues=BORROWED) is None
    assert choose([2, 1], [*jobs, old("z", [2], where="b")], queues=BORROWED) is None


def test_a_borrowing_queue_reclaims_nothing() -> None:
    jobs = [old("x", [0, 1], where="b"), old("y", [2], where="b")]
    assert choose([2, 1], jobs, queues=(queue("a", 1, "top"), queue("b", 1, "top"), queue("top"))) is None


def test_reclaim_goes_by_the_cohorts_where_ways_part() -> None:
    # Neither queue has quota of its own: the left side has some, and b borrows it.
    queues = (queue("a", parent="left"), queue("left", 2, "top"), queue("b", parent="right"), queue("right", 1, "top"))
    jobs = [old("x", [0, 1], where="b"), old("y", [2], where="b")]
    found = choose([2, 1], jobs, queues=(*queues, queue("top")))
    assert found is not None
    assert found.reclaim == {"x"}
    # On one side of the way no queue owns anything: what is shared is first come, first served.
    siblings = (queue("a", parent="left"), queue("b", parent="left"), queue("left", 3))
    assert choose([2, 1], jobs, queues=siblings) is None


def test_quota_is_freed_wherever_it_lies() -> None:
    queues = (queue("a", 3),)
    jobs = [old("far", [4, 5, 6], lost_s=10), old("near", [0], lost_s=500)]
    found = choose([2, 2, 3], jobs, queues=queues, preemptor=waiting("p", workers=2, priority=5))
    assert found is not None
    assert (found.uids, found.domain) == (("far",), "r1")


def test_gangs_that_share_nodes_go_together() -> None:
    jobs = [old("x", [0, 1], lost_s=10), old("y", [0, 1], lost_s=20), old("z", [2, 3], devices=2, lost_s=100)]
    found = choose([2, 2], jobs, devices=2, preemptor=waiting("p", workers=2, devices=2, priority=5))
    assert found is not None
    assert (found.uids, found.cost_device_s) == (("x", "y"), 60.0)


def test_an_exclusive_gang_clears_whole_domains() -> None:
    jobs = [old("x", [0], lost_s=10), old("y", [3], lost_s=1000)]
    found = choose([3, 3], jobs, topology=Topology(exclusive="rack"))
    assert found is not None
    assert (found.uids, found.domain) == (("x",), "")


@pytest.mark.parametrize("level", ["rack", "host"])
def test_where_no_node_bears_the_labels_an_exclusive_gang_clears_nothing(level: str) -> None:
    jobs = [old("x", [0])]
    nodes = inventory([2], jobs=jobs)
    nodes.domain_LN[0] = -1
    nodes.domain_names = ((), nodes.names)
    nodes.usable_N[:] = False
    job = waiting("p", workers=1, priority=5)
    request = GangRequest(workers=1, devices=1, requests=job.requests, topology=Topology(exclusive=level))
    tree = QueueTree.of(ONE)
    ledger = QuotaLedger(tree, used_by(jobs))
    assert choose_victims(nodes, request, job, jobs, tree=tree, ledger=ledger, now_s=NOW_S) is None


def test_preferred_nearness_yields_to_the_next_level() -> None:
    jobs = [old("x", [0]), old("y", [1]), old("z", [2])]
    wide = choose([1, 1, 1], jobs, topology=Topology(preferred="rack"))
    assert wide is not None
    assert (wide.level, len(wide.uids)) == ("", 2)
    near = choose([1, 2], jobs, topology=Topology(preferred="rack"))
    assert near is not None
    assert (near.level, near.uids) == ("rack", ("y", "z"))


def test_blocked_nodes_are_no_use() -> None:
    blocked_N = np.array([True, False, False, False])
    found = choose([2, 2], [old("x", [0, 1], lost_s=1), old("y", [2, 3])], blocked_N=blocked_N)
    assert found is not None
    assert found.uids == ("y",)


def test_a_worker_whose_node_is_gone_holds_quota_and_no_room() -> None:
    found = choose([2], [old("x", [-1, -1])], queues=(queue("a", 2),))
    assert found is not None
    assert found.uids == ("x",)


def test_a_spent_budget_returns_the_best_so_far() -> None:
    jobs = [old(f"j{at:02}", [at], lost_s=1000 + at) for at in range(40)]
    found = choose([20, 20], jobs, preemptor=waiting("p", workers=10, priority=5), work_units=1)
    assert found is not None
    assert len(found.uids) >= 10
    whole = choose([20, 20], jobs, preemptor=waiting("p", workers=10, priority=5))
    assert whole is not None
    assert whole.uids == tuple(f"j{at:02}" for at in range(10))


def test_many_victims_are_counted() -> None:
    jobs = [old(f"j{at}", [at], lost_s=3600) for at in range(5)]
    found = choose([5], jobs, preemptor=waiting("p", workers=5, priority=5))
    assert found is not None
    assert found.message == (
        "preempting ns/j0, ns/j1, ns/j2 and 2 more in r0: 5.0 device-hours since the last checkpoints"
    )


def test_a_level_that_does_not_exist_clears_nothing() -> None:
    assert choose([2], [old("x", [0, 1])], topology=Topology(required="aisle")) is None


def test_every_queue_on_the_victims_way_must_borrow() -> None:
    way = (queue("b", 1, "right"), queue("c", 3, "right"), queue("right", parent="top"))
    jobs = [old("x", [0, 1], where="b"), old("y", [2], where="b")]
    # b borrows, but only of c, and their side as a whole does not: what a lacks is not there.
    assert choose([2, 1], jobs, queues=(queue("a", 2, "top"), *way, queue("top"))) is None
    lean = (queue("b", 1, "right"), queue("c", 1, "right"), queue("right", parent="top"))
    found = choose([2, 1], jobs, queues=(queue("a", 2, "top"), *lean, queue("top")))
    assert found is not None
    assert found.reclaim == {"x"}


def test_own_jobs_make_room_below_the_quota_first() -> None:
    queues = (queue("a", 3, "top"), queue("b", 1, "top"), queue("top"))
    jobs = [old("own", [0, 1], lost_s=10), old("lent", [2, 3], where="b", lost_s=10)]
    found = choose([3, 1], jobs, queues=queues, preemptor=waiting("p", workers=3, priority=5))
    assert found is not None
    assert set(found.uids) == {"lent", "own"}
    assert found.reclaim == {"lent"}


def test_a_queue_that_borrows_one_resource_reclaims_no_other() -> None:
    both = tuple(Quota(resource=name, nominal=2) for name in (GPU, "cpu"))
    queues = (
        dataclasses.replace(queue("a", parent="top"), quotas=both),
        dataclasses.replace(queue("b", parent="top"), quotas=(Quota(resource=GPU, nominal=0), both[1])),
        queue("top"),
    )
    job = dataclasses.replace(waiting("p", workers=2, priority=5), requests=((GPU, 1), ("cpu", 1)))
    jobs = [old("x", [0, 1], where="b")]
    nodes = inventory([2], jobs=jobs)
    nodes = dataclasses.replace(
        nodes,
        resources=(GPU, "cpu"),
        capacity_NR=np.array([[1, 9], [1, 9]]),
        used_NR=np.array([[1, 0], [1, 0]]),
    )
    tree = QueueTree.of(queues)

    def asked(cpu_used: int) -> Victims | None:
        ledger = QuotaLedger(tree, {("b", GPU): 2, ("a", "cpu"): cpu_used})
        request = GangRequest(workers=2, devices=1, requests=job.requests)
        return choose_victims(nodes, request, job, jobs, tree=tree, ledger=ledger, now_s=NOW_S)

    assert asked(0) is not None
    assert asked(1) is None


def test_the_last_of_a_queue_may_bring_it_below_its_quota_and_no_other() -> None:
    tree = QueueTree.of([queue("a", 5, "top"), queue("b", 3, "top"), queue("top")])
    small, large = old("small", [0], where="b"), old("large", [1, 2, 3, 4], where="b")
    trial = QuotaTrial.of(tree, QuotaLedger(tree, used_by([small, large])), waiting("p", workers=5))
    assert trial.allow([large, small])
    third = old("third", [5], where="b")
    trial = QuotaTrial.of(tree, QuotaLedger(tree, {("b", GPU): 5}), waiting("p", workers=5))
    assert not trial.allow([large, small, third])
    assert trial.allow([small, third])


def test_own_victims_are_freed_before_entitlement_is_judged() -> None:
    tree = QueueTree.of([queue("a", 3, "top"), queue("b", 1, "top"), queue("top")])
    own, lent = old("own", [0, 1]), old("lent", [2], where="b")
    trial = QuotaTrial.of(tree, QuotaLedger(tree, {("a", GPU): 2, ("b", GPU): 2}), waiting("p", workers=3))
    assert trial.allow([lent, own])
    assert not trial.allow([lent])


def test_of_two_that_could_be_let_off_only_one_is_if_both_are_too_many() -> None:
    jobs = [old("a", [0], lost_s=100), old("b", [1], lost_s=90), old("c", list(range(2, 12)), lost_s=200)]
    jobs += [old(f"dear{at}", [12 + at], lost_s=9000) for at in range(8)]
    found = choose([20], jobs, preemptor=waiting("p", workers=11, priority=5))
    assert found is not None
    assert found.uids == ("b", "c")


def test_a_job_that_must_not_preempt_does_not_even_wait_for_what_stops() -> None:
    leaving = [old("x", [0, 1], stopping=True)]
    assert choose([2], leaving) is not None
    assert choose([2], leaving, preemptor=waiting("p", workers=2, priority=5, may_preempt=False)) is None
