"""Informational writes, and events: what waits, what is dropped, and that the newest one is written."""

from __future__ import annotations

import asyncio

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.publishing.event_recorder import OBJECT_BURST, QUEUE_MAX, EventRecorder
from polyreme_operator.publishing.status_throttle import StatusThrottle
from polyreme_operator.types.actions import EmitEvent


class SetClock:
    """A clock that is set by hand; sleeping moves it on."""

    def __init__(self) -> None:
        self.at_s = 1_000.0
        self.slept_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def steady_s(self) -> float:
        return self.at_s

    async def sleep(self, delay_s: float) -> None:
        self.slept_s += delay_s
        self.at_s += delay_s
        await asyncio.sleep(0)


def telling(clock: SetClock, *, per_s: float = 10.0, burst: int = 2) -> StatusThrottle:
    return StatusThrottle(clock.steady_s, rest_s=1.0, per_s=per_s, burst=burst)


def event(uid: str = "u0", number: int = 0, *, warning: bool = False) -> EmitEvent:
    ref = ObjectRef(kind="TrainingJob", namespace="team", name="job")
    return EmitEvent(ref=ref, uid=uid, reason="Admitted", message="", warning=warning, key=f"{number}")


def turns(clock: SetClock, times: StatusThrottle) -> list[tuple[str, float]]:
    """Give a turn to each job that wants one, and use it; return which job had it, and when."""
    began_s, had = clock.at_s, []
    while (wait_s := times.wait_s()) is not None:
        clock.at_s += wait_s
        uid = times.take()
        assert uid is not None
        had.append((uid, round(clock.at_s - began_s, 6)))
        times.spend()
    return had


def test_what_only_tells_rests_after_the_first_sight_and_after_every_write() -> None:
    clock = SetClock()
    times = telling(clock)
    assert times.wait_s() is None
    times.wants("a", runs=False)
    assert times.wait_s() == 1.0
    clock.at_s += 0.75
    times.wants("a", runs=False)
    assert times.wait_s() == 0.25, "looking again does not put it off further"
    times.wrote("a")
    assert times.wait_s() is None, "another write has told everything"
    times.wants("a", runs=True)
    assert times.wait_s() == 1.0
    clock.at_s += 1.0
    assert times.take() == "a"
    assert times.wait_s() is None


def test_each_job_has_one_turn_in_the_order_of_wishes_within_the_budget() -> None:
    clock = SetClock()
    times = telling(clock, per_s=10.0, burst=1)
    for number in [*range(5), *range(5)]:
        times.wants(f"j{number}", runs=False)
    assert turns(clock, times) == [("j0", 1.0), ("j1", 1.0), ("j2", 1.1), ("j3", 1.2), ("j4", 1.3)]


def test_a_turn_that_is_gone_when_it_is_taken_is_nobodys() -> None:
    """Others work between the question and the answer: the update may have been written with more."""
    clock = SetClock()
    tells = telling(clock)
    tells.wants("a", runs=False)
    clock.at_s += 1.0
    assert tells.wait_s() == 0.0
    tells.wrote("a")
    assert tells.take() is None
    assert tells.wait_s() is None


def test_a_job_without_an_update_uses_no_turn() -> None:
    clock = SetClock()
    times = telling(clock, per_s=10.0, burst=1)
    for number in range(50):
        times.wants(f"j{number}", runs=False)
    clock.at_s += 1.0
    assert [times.take() for _ in range(50) if times.wait_s() == 0.0] == [f"j{number}" for number in range(50)]


def test_running_and_waiting_jobs_share_the_write_budget() -> None:
    clock = SetClock()
    times = telling(clock)
    for number in range(1_000):
        times.wants(f"waits{number}", runs=False)
    for number in range(3):
        times.wants(f"runs{number}", runs=True)
    first = [uid for uid, _ in turns(clock, times)[:8]]
    assert first == ["waits0", "runs0", "waits1", "runs1", "waits2", "runs2", "waits3", "waits4"]


def test_a_job_that_is_forgotten_is_seen_for_the_first_time_again() -> None:
    clock = SetClock()
    times = telling(clock)
    times.wants("a", runs=False)
    clock.at_s += 5.0
    times.forget("a")
    assert times.wait_s() is None
    times.wants("a", runs=False)
    assert times.wait_s() == 1.0


def announced(events: list[EmitEvent], *, per_s: float = 1_000.0, burst: int = 1) -> tuple[list[str], int, SetClock]:
    """Put events before the announcer runs; return the names written, how many were dropped, and the clock."""
    clock = SetClock()
    dropped: list[EmitEvent] = []
    store = Store(new_uid=iter(map(str, range(10_000))).__next__, now_s=clock.now_s)
    cluster = EmbeddedCluster(store)

    async def story() -> list[str]:
        announcer = EventRecorder(cluster, clock, per_s=per_s, burst=burst, dropped=dropped.append)
        for each in events:
            announcer.put(each)
        running = asyncio.ensure_future(announcer.run())
        for _ in range(20 * len(events) + 20):
            await asyncio.sleep(0)
        running.cancel()
        items: list[Manifest] = []
        token: str | None = None
        while True:
            page = await cluster.list("Event", continue_=token)
            items += page.items
            if (token := page.continue_) is None:
                break
        items.sort(key=lambda item: int(item["metadata"]["resourceVersion"]))
        return [item["metadata"]["name"] for item in items]

    return asyncio.run(story()), len(dropped), clock


def test_events_per_object_are_rate_limited() -> None:
    names, dropped, _ = announced([event(number=number) for number in range(OBJECT_BURST + 5)])
    assert len(names) == OBJECT_BURST
    assert dropped == 5


def test_a_full_queue_drops_and_counts_and_warnings_go_first() -> None:
    many = [event(f"u{number}", number) for number in range(QUEUE_MAX + 3)]
    names, dropped, _ = announced([*many, event("w", 7, warning=True)])
    assert len(names) == QUEUE_MAX
    assert dropped == 4, "three that came late, and one in whose place the warning went"
    assert names[0].endswith(".7")
    assert names[0].startswith("job-")


def test_events_wait_for_their_budget() -> None:
    names, dropped, clock = announced([event(f"u{number}") for number in range(11)], per_s=10.0)
    assert len(names) == 11
    assert dropped == 0
    assert 0.8 <= clock.slept_s <= 1.1


def test_a_repeated_event_uses_no_budget() -> None:
    names, dropped, _ = announced([event("u0"), event("u0"), event("u1")])
    assert len(names) == 2
    assert dropped == 0
