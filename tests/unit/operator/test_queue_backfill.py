"""Who may use what is held for a blocked head."""

from typing import Any

import pytest

from polyreme_api.job.workers import Topology
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler.backfill import Hold, hold_for, may_fill
from polyreme_operator.types.inventory import GangRequest
from polyreme_operator.types.queues import QueueView, Running
from tests.unit.operator.queue_scenes import GPU, inventory, queue, running, used_by, waiting

NOW_S = 1000.0
HEAD: dict[str, Any] = {"workers": 2, "priority": 5}


def hold(racks: list[int], jobs: list[Running], *, level: str | None = None, quota: int = 100) -> Hold | None:
    head = waiting("head", **HEAD)
    request = GangRequest(workers=2, devices=1, requests=head.requests, topology=Topology(required=level))
    ledger = QuotaLedger(QueueTree.of([queue("a", quota)]), used_by(jobs))
    return hold_for(inventory(racks, jobs=jobs), request, head, jobs, ledger=ledger, now_s=NOW_S)


def rows(held: Hold | None) -> list[int]:
    assert held is not None
    found: list[int] = held.rows_N.nonzero()[0].tolist()
    return found


def test_the_head_is_held_the_nodes_that_come_free_first() -> None:
    jobs = [running("x", "a", [0, 1], ends_at_s=5000.0), running("y", "a", [2, 3], ends_at_s=3000.0)]
    held = hold([2, 2], jobs, level="rack")
    assert rows(held) == [2, 3]
    assert held is not None
    assert held.ready_at_s == 3000.0


def test_what_stops_comes_free_at_once() -> None:
    held = hold([2], [running("x", "a", [0, 1], stopping=True)])
    assert rows(held) == [0, 1]
    assert held is not None
    assert held.ready_at_s == NOW_S


def test_quota_that_comes_free_later_is_waited_for() -> None:
    jobs = [running("x", "a", [0], ends_at_s=2000.0), running("y", "a", [1], ends_at_s=4000.0)]
    held = hold([4], jobs, quota=2)
    assert held is not None
    assert held.ready_at_s == 4000.0


def test_without_deadlines_all_free_nodes_nearby_are_held() -> None:
    jobs = [running("x", "a", [0]), running("y", "a", [2, 3])]
    held = hold([2, 3], jobs, level="rack")
    assert held is not None
    assert held.ready_at_s is None
    assert rows(held) == [1]
    assert rows(hold([2, 1], [running("x", "a", [0, 2])])) == [1]


def test_what_could_never_start_holds_nothing() -> None:
    assert hold([1, 1], [running("x", "a", [0])], level="rack") is None
    assert hold([2], [running("x", "a", [0])], quota=1) is None


@pytest.mark.parametrize(
    ("fields", "ready_at_s", "fills"),
    [
        ({"ends_within_s": 500.0, "preemptible": False}, 1500.0, True),
        ({"ends_within_s": 501.0, "preemptible": False}, 1500.0, False),
        ({"ends_within_s": 1.0, "preemptible": False}, None, False),
        ({}, None, True),
        ({"preemptible": False}, None, False),
        ({"priority": 5}, None, False),
        ({}, 1060.0, True),
        ({}, 1059.0, False),
        ({"min_runtime_s": 600.0}, 1500.0, False),
        ({"min_runtime_s": 500.0}, 1500.0, True),
        ({"min_runtime_s": 1.0}, None, False),
    ],
)
def test_a_filler_ends_before_or_yields(fields: Any, ready_at_s: float | None, fills: bool) -> None:
    assert fill([queue("a", 100)], fields, ready_at_s) is fills


def fill(queues: list[QueueView], fields: Any, ready_at_s: float | None, used: int = 0) -> bool:
    tree, head = QueueTree.of(queues), waiting("head", **HEAD)
    ledger = QuotaLedger(tree, {("b", GPU): used})
    ledger.charge(head.queue, head.requests, head.workers)
    return may_fill(
        waiting("f", **fields),
        head=head,
        head_ready_at_s=ready_at_s,
        tree=tree,
        ledger=ledger,
        now_s=NOW_S,
    )


def test_a_filler_of_another_queue_yields_only_what_it_borrows() -> None:
    cohort = [queue("a", 4, "top"), queue("b", 4, "top"), queue("top")]
    assert not fill(cohort, {"where": "b"}, None, used=3)
    assert fill(cohort, {"where": "b"}, None, used=4)
    assert not fill([queue("a", 1, "top"), *cohort[1:]], {"where": "b"}, None, used=4)


def test_a_queue_may_do_without_backfill() -> None:
    assert not fill([queue("a", 100, backfill=False)], {"ends_within_s": 1.0}, 1500.0)
