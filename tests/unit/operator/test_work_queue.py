"""Deduplication, delays, rests and backoff of the operator's work queue."""

from __future__ import annotations

from polyreme_operator.work_queue import WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def queue(clock: Clock | None = None, *, processing_max: int = 9) -> WorkQueue:
    return WorkQueue(
        clock or Clock(), first=("plan",), processing_max=processing_max, backoff_s=lambda failures: 2.0**failures
    )


def taken(work: WorkQueue) -> list[str]:
    keys = []
    while (key := work.get()) is not None:
        keys.append(key)
    return keys


def test_a_key_is_handed_out_once_in_the_order_of_its_first_addition() -> None:
    work = queue()
    work.add("b", "a")
    work.add("c", "b")
    assert len(work) == 3
    assert taken(work) == ["b", "a", "c"]
    assert work.get() is None


def test_a_key_that_is_added_while_it_is_processed_follows_when_it_is_done() -> None:
    work = queue()
    work.add("a")
    assert work.get() == "a"
    work.add("a", "b")
    assert taken(work) == ["b"]
    work.done("a")
    assert taken(work) == ["a"]


def test_first_keys_go_before_others_and_need_no_free_worker() -> None:
    work = queue(processing_max=1)
    work.add("a", "b", "plan")
    assert taken(work) == ["plan", "a"]
    work.done("a")
    work.done("plan")
    work.add("plan")
    assert taken(work) == ["plan", "b"]


def test_the_shortest_delay_of_a_key_counts() -> None:
    clock = Clock()
    work = queue(clock)
    work.add_at("a", 110.0)
    work.add_at("a", 105.0)
    work.add_at("a", 120.0)
    work.add_at("b", 107.0)
    assert (work.next_due_s(), list(work.due())) == (105.0, [])
    clock.now_s = 107.0
    assert list(work.due()) == ["a", "b"]
    clock.now_s = 200.0
    assert (work.next_due_s(), list(work.due())) == (None, [])


def test_a_resting_key_is_handed_out_when_its_rest_is_over() -> None:
    clock = Clock()
    work = queue(clock)
    work.rest_until("a", 101.0)
    work.add("a", "b")
    assert taken(work) == ["b"]
    clock.now_s = 101.0
    work.add(*work.due())
    assert taken(work) == ["a"]
    work.done("a")
    work.add("a")
    assert taken(work) == ["a"], "its rest was over"


def test_each_failure_in_a_row_waits_longer_until_it_is_forgotten() -> None:
    work = queue()
    assert [work.retry_delay_s("a") for _ in range(3)] == [2.0, 4.0, 8.0]
    assert work.retry_delay_s("b") == 2.0
    work.forget("a")
    assert work.retry_delay_s("a") == 2.0


def test_a_removed_key_leaves_nothing_behind() -> None:
    clock = Clock()
    work = queue(clock)
    work.add_at("a", 101.0)
    work.rest_until("a", 105.0)
    work.retry_delay_s("a")
    work.remove("a")
    clock.now_s = 102.0
    assert (work.next_due_s(), list(work.due())) == (None, [])
    work.add("a")
    assert taken(work) == ["a"]
    assert work.retry_delay_s("a") == 2.0


def test_delays_that_were_shortened_take_no_memory_without_bound() -> None:
    work = queue()
    for number in range(10_000):
        work.add_at("a", 1e6 - number)
    assert len(work._timers) < 100
    assert work.next_due_s() == 1e6 - 9_999
