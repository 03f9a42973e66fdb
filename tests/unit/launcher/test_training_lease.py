"""Right to train: simulated failovers, the leader's watch of the checkpoint root, and the rank that obeys it."""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import os
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import FencedError
from polyreme_api.history import claim_key
from polyreme_api.rank_state import UNTIL_NS
from polyreme_datahub.objects import open_store
from polyreme_launcher import fence_watch
from polyreme_launcher.agent import Launcher
from polyreme_launcher.fence_watch import NS, FenceWatch
from polyreme_launcher.protocol.training_lease import LOOK_EVERY_S, TTL_S, TrainingLease
from polyreme_launcher.rank_pages import RankPages
from polyreme_system.clock import boot_s
from polyreme_system.rank_page import PAGE_BYTES, PageWriter, write_number
from polyreme_trainer import rank_page

DRIFT_MAX = 0.01
STEP_S = 2.0
Confirm = Callable[[TrainingLease, float, float], TrainingLease]


@dataclasses.dataclass
class Failover:
    """One gang, its store and its API server, until long after a newer attempt has claimed the run.

    Time is the world's; the gang's own clock runs faster or slower by its drift.
    """

    random: random.Random
    confirm: Confirm
    """What the gang makes of an answer: its lease, the request's beginning, and the answer's time."""
    waits: bool
    """Whether the newer attempt waits until the older one must have stopped."""
    sees_claims: bool
    """Whether a look tells the gang of a newer attempt."""

    def late_steps(self) -> list[tuple[float, bool]]:
        """Return steps that begin later than an older gang may train, and whether it was frozen just before."""
        draw = self.random
        rate = 1.0 + draw.uniform(-DRIFT_MAX, DRIFT_MAX)
        claimed_s = draw.uniform(0.0, 300.0)
        cuts = {name: _spans(draw, 4) for name in ("store", "api")}
        frozen = _spans(draw, 2)
        fence_s = claimed_s + self.waits * TTL_S * (1.0 + 2.0 * DRIFT_MAX)
        lease, fenced, late = TrainingLease(1, 0.0), False, []
        now_s, look_s = 0.0, LOOK_EVERY_S
        while not fenced and now_s < claimed_s + 4 * TTL_S:
            if now_s >= look_s:
                look_s = now_s + LOOK_EVERY_S / rate
                for name in ("store", "api"):
                    # What the request sees is settled somewhere between its beginning and its answer.
                    seen_s = now_s + draw.uniform(0.0, 20.0)
                    answered_s = _thawed(seen_s + draw.uniform(0.0, 20.0), frozen)
                    if _within(seen_s, cuts[name]) or _within(now_s, cuts[name]):
                        continue
                    newer = self.sees_claims and seen_s >= claimed_s
                    fenced |= newer and answered_s <= now_s + 20.0
                    if not newer:
                        lease = self.confirm(lease, now_s * rate, answered_s * rate)
            may_begin = now_s * rate < lease.until_s
            began_s = _thawed(now_s, frozen)
            if may_begin and not fenced and began_s > fence_s:
                late.append((began_s, began_s > now_s))
            now_s = began_s + STEP_S
        return late


def _spans(draw: random.Random, most: int) -> list[tuple[float, float]]:
    begins = [draw.uniform(0.0, 500.0) for _ in range(draw.randrange(most + 1))]
    return [(begin_s, begin_s + draw.expovariate(1 / 60.0)) for begin_s in begins]


def _within(at_s: float, spans: list[tuple[float, float]]) -> bool:
    return any(begin_s <= at_s < end_s for begin_s, end_s in spans)


def _thawed(at_s: float, frozen: list[tuple[float, float]]) -> float:
    """Return when a process that is frozen meanwhile comes to what is due at a time."""
    while span := next((span for span in frozen if span[0] <= at_s < span[1]), None):
        at_s = span[1]
    return at_s


def from_beginning(lease: TrainingLease, began_s: float, _: float) -> TrainingLease:
    return lease.confirmed(began_s)


def from_answer(lease: TrainingLease, _: float, answered_s: float) -> TrainingLease:
    return lease.confirmed(answered_s)


def late_steps(
    failovers: int, confirm: Confirm = from_beginning, *, waits: bool = True, sees_claims: bool = True
) -> list[list[tuple[float, bool]]]:
    found = [Failover(random.Random(seed), confirm, waits, sees_claims).late_steps() for seed in range(failovers)]
    return [steps for steps in found if steps]


@pytest.mark.slow
def test_in_no_failover_two_gangs_train_but_for_one_step_of_a_thawed_one() -> None:
    late = late_steps(20_000)
    assert all(len(steps) == 1 and steps[0][1] for steps in late)
    assert late, "freezes between the look at the clock and the step occur"


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", [{"confirm": from_answer}, {"waits": False}, {"sees_claims": False}], ids=lambda bug: next(iter(bug))
)
def test_planted_bugs_are_caught(bug: dict[str, Any]) -> None:
    assert any(not thawed for steps in late_steps(1000, **bug) for _, thawed in steps)


class ManualClock:
    """Wakes its sleepers one after the other."""

    def __init__(self) -> None:
        self.passed_s = 1000.0

    def now_s(self) -> float:
        return self.passed_s

    def steady_s(self) -> float:
        return self.passed_s

    async def sleep(self, delay_s: float) -> None:
        self.passed_s += delay_s
        await asyncio.sleep(0)


@dataclasses.dataclass
class Watched:
    """A watch of a real folder, and what it said."""

    watch: FenceWatch
    clock: ManualClock
    fenced: list[int]

    def look(self, looks: int = 1) -> None:
        async def run() -> None:
            task = asyncio.create_task(self.watch.run())
            until_s = self.clock.passed_s + looks * LOOK_EVERY_S
            while self.clock.passed_s <= until_s:
                await asyncio.sleep(0)
            task.cancel()

        asyncio.run(run())


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    clock, fenced = ManualClock(), list[int]()
    url = (tmp_path / "root").as_uri()
    open_store(url).put_if_absent(claim_key(1), b"")
    watch = FenceWatch(url, clock=clock, on_fenced=fenced.append, now_s=clock.now_s)
    return Watched(watch, clock, fenced)


def test_a_leader_that_finds_no_newer_attempt_keeps_the_right_to_train(watched: Watched) -> None:
    assert watched.watch.until_ns == 0, "nothing is released"
    watched.watch.begin(1)
    assert watched.watch.until_ns == (1000 + TTL_S) * NS
    watched.look(looks=3)
    assert watched.watch.until_ns >= (1000 + 2 * LOOK_EVERY_S + TTL_S) * NS
    assert watched.fenced == []


def test_a_claim_of_a_newer_attempt_ends_the_gang_at_the_next_look(watched: Watched, tmp_path: Path) -> None:
    watched.watch.begin(1)
    open_store((tmp_path / "root").as_uri()).put_if_absent(claim_key(2), b"")
    watched.look()
    assert watched.fenced[0] == 1
    watched.fenced.clear()
    watched.watch.begin(2)
    watched.look()
    assert watched.fenced == [], "the newest attempt trains on"


def test_a_root_that_is_away_proves_nothing_but_a_written_lease_does(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: str) -> None:
        raise OSError("away")

    monkeypatch.setattr(fence_watch, "open_store", away)
    watched.watch.begin(1)
    until_ns = watched.watch.until_ns
    watched.look(looks=2)
    assert (watched.watch.until_ns, watched.fenced) == (until_ns, [])
    watched.watch.confirm(2, watched.clock.now_s())
    assert watched.watch.until_ns == until_ns, "of another attempt"
    watched.watch.confirm(1, watched.clock.now_s())
    assert watched.watch.until_ns == (watched.clock.now_s() + TTL_S) * NS


def test_the_leaders_launcher_writes_the_end_of_the_lease_for_its_ranks_at_each_tick() -> None:
    seen, ticks, leases = list[int](), list[None](), iter([0, 7, 9])

    async def sleep(_: float) -> None:
        if len(ticks) == 3:
            raise asyncio.CancelledError

    class Agent:
        fence = types.SimpleNamespace(until_ns=0)

        def tick(self) -> None:
            ticks.append(None)
            self.fence.until_ns = next(leases)

    launcher: Any = types.SimpleNamespace(
        _clock=types.SimpleNamespace(steady_s=lambda: 0.0, sleep=sleep),
        _data_engine=None,
        _feed=lambda _: None,
        _leader_agent=Agent(),
        _ranks=types.SimpleNamespace(limit=seen.append),
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Launcher._tick(launcher))
    assert seen == [0, 7, 9]


def test_a_rank_begins_no_step_when_the_right_to_train_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = RankPages()
    writer = PageWriter(moves=5, moved_ns=9)
    with pages.open(0, 0) as descriptor:
        assert descriptor is not None
        writer.attach(os.dup(descriptor))
    monkeypatch.setattr(rank_page, "_PAGE", writer)
    rank_page.check_lease()  # there is no limit yet
    pages.limit(int((boot_s() + 100) * NS))
    rank_page.check_lease()
    pages.limit(int((boot_s() - 3) * NS))
    with pytest.raises(FencedError, match=r"ended 3 s ago, since neither the checkpoint root nor the API server"):
        rank_page.check_lease()
    pages.close()


def test_the_limit_shares_its_place_with_nothing_that_ranks_write() -> None:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        write_number(page, UNTIL_NS, 7)
        assert page[UNTIL_NS * 8] == 7
    assert UNTIL_NS == PAGE_BYTES // 8 - 1
