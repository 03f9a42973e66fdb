"""What queues used is forgotten by halves, and what they use counts at once."""

import math

import pytest

from polyreme_operator.queueing.fair_share import Shares, decayed
from polyreme_operator.queueing.order import first_of, scheduling_order
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.queueing.waiting import WaitingIndex
from polyreme_operator.types.queues import QueueView, StopPolicy
from tests.unit.operator.queue_scenes import GPU, gpus, queue, waiting

DAY_S = 86_400.0


def remembering(name: str, seconds: float, parent: str = "top") -> QueueView:
    return queue(name, 8, parent, used_seconds=((GPU, seconds),), used_at_s=1.0, half_life_s=DAY_S)


def test_half_is_forgotten_in_a_half_life() -> None:
    assert dict(decayed(remembering("a", 1000.0), {}, 1.0 + DAY_S)) == pytest.approx({GPU: 500.0})


def test_steady_use_tends_to_pieces_times_the_mean_life() -> None:
    view = remembering("a", 0.0)
    ((_, late),) = decayed(view, {GPU: 10}, 1.0 + 60 * DAY_S)
    assert late == pytest.approx(10 * DAY_S / math.log(2))
    ((_, early),) = decayed(view, {GPU: 10}, 2.0)
    assert early == pytest.approx(10.0, rel=1e-4)


def test_decay_in_steps_is_decay_at_once() -> None:
    view, used = remembering("a", 777.0), {GPU: 3}
    at_once = decayed(view, used, 5001.0)
    for now_s in (1001.0, 1500.0, 4000.0, 5001.0):
        view = queue("a", 8, used_seconds=decayed(view, used, now_s), used_at_s=now_s, half_life_s=DAY_S)
    assert dict(view.used_seconds) == pytest.approx(dict(at_once))


def test_a_queue_that_was_never_counted_starts_from_nothing() -> None:
    assert decayed(queue("a", 8), {GPU: 10}, 1e9) == ()
    assert decayed(queue("a", 8, half_life_s=0.0, used_seconds=((GPU, 5.0),), used_at_s=1.0), {GPU: 1}, 2.0) == ()


def test_what_is_as_good_as_forgotten_is_dropped() -> None:
    assert decayed(remembering("a", 1.0), {}, 1.0 + 20 * DAY_S) == ()


def test_a_share_is_dominant_weighted_and_includes_the_past() -> None:
    queues = [queue("a", 8, "top", weight=2), queue("b", 8, "top"), queue("top")]
    shares = Shares(QueueTree.of(queues), {("a", GPU): 4, ("a", "cpu"): 90, ("b", GPU): 4}, {"cpu": 100}, 1.0)
    assert (shares.of("a"), shares.of("b"), shares.of("top")) == (0.45, 0.25, 0.9)
    mean_life_s = DAY_S / math.log(2)
    past = Shares(QueueTree.of([remembering("a", 2 * mean_life_s), *queues[1:]]), {("a", GPU): 2}, {}, 1.0)
    assert past.of("a") == pytest.approx(4 / 16)


def test_the_queue_that_was_just_served_comes_later() -> None:
    queues = [queue("a", 8, "top"), queue("b", 8, "top", weight=2), queue("top")]
    tree = QueueTree.of(queues)
    jobs = [waiting(f"{name}{at}", name, since_s=at, kind=ord(name)) for name in "ab" for at in range(4)]
    order = scheduling_order(jobs, tree, Shares(tree, {}, {}, 0.0), 10.0)
    seen = []
    for job in order:
        seen.append(job.uid)
        order.admitted(job)
    assert seen == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]


def test_aging_lifts_the_old_above_the_important() -> None:
    tree = QueueTree.of([queue("a", 8, aging_s=100.0)])
    jobs = [waiting("old", since_s=0.0, priority=0), waiting("new", since_s=900.0, priority=8, kind=1)]
    index = WaitingIndex(jobs)
    assert [job.uid for job in first_of(index, tree, "a", 999.0, limit=5)] == ["old", "new"]
    assert [job.uid for job in first_of(index, tree, "a", 900.0, limit=5)] == ["old", "new"]
    assert [job.uid for job in first_of(index, tree, "a", 799.0, limit=5)] == ["new", "old"]
    assert [job.uid for job in first_of(index, tree, "a", 999.0, limit=1)] == ["old"]


def test_queues_that_are_held_or_not_in_order_are_passed_over() -> None:
    queues = [queue("a", 8, stop_policy=StopPolicy.HOLD), queue("b", 8, "gone"), queue("c", 8)]
    tree = QueueTree.of(queues)
    jobs = [waiting(name, name, kind=at) for at, name in enumerate(("a", "b", "c", "nowhere", "default"))]
    order = scheduling_order(jobs, tree, Shares(tree, {}, {}, 0.0), 0.0)
    assert [job.uid for job in order] == ["c", "default"]


def test_a_refused_class_is_not_looked_at_again() -> None:
    tree = QueueTree.of([queue("a", 8)])
    jobs = [waiting(f"j{at}", since_s=at, kind=at % 2) for at in range(6)]
    order = scheduling_order(jobs, tree, Shares(tree, {}, {}, 0.0), 0.0)
    assert next(order).uid == "j0"
    order.refuse(0)
    assert [job.uid for job in order] == ["j1", "j3", "j5"]


def test_what_is_charged_counts_for_every_cohort_above() -> None:
    queues = [queue("a", 4, "left"), queue("left", parent="top"), queue("b", 4, "top"), queue("top")]
    shares = Shares(QueueTree.of(queues), {}, {}, 0.0)
    shares.charge("a", gpus(2), 2)
    assert (shares.of("a"), shares.of("left"), shares.of("b"), shares.own("left")) == (0.5, 0.5, 0.0, 0.0)


def test_a_resource_that_neither_quota_nor_node_has_is_no_share() -> None:
    shares = Shares(QueueTree.of([queue("a", 8)]), {("a", GPU): 2, ("a", "example.com/gone"): 90}, {}, 1.0)
    assert shares.of("a") == 0.25
