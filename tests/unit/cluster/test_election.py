"""The Lease: taken when free or silent, renewed in time, left before another may have it, given back at the end."""

import asyncio
import random

import pytest

from polyreme_cluster.election import (
    DEADLINE_RATIO,
    LEASE_S,
    RENEW_S,
    Move,
    Seen,
    _Candidate,
    decide,
    lease_spec,
    observe,
)
from polyreme_cluster.port import Manifest
from tests.unit.cluster.election_scenes import (
    LEASE,
    Contest,
    SkewedClock,
    Weather,
    WeatherPort,
    in_virtual_time,
)

SEEN = Seen(version="7", holder="a", duration_s=15.0, transitions=2, acquired="t0", renewed="t1", since_s=100.0)


def manifest(version: str = "7", **spec: object) -> Manifest:
    said = {"holderIdentity": "a", "leaseDurationSeconds": 15, "acquireTime": "t0", "renewTime": "t1"}
    return {"metadata": {"resourceVersion": version}, "spec": {**said, "leaseTransitions": 2, **spec}}


@pytest.mark.parametrize(
    ("seen", "now_s", "move"),
    [
        (None, 100.0, Move.CREATE),
        (SEEN, 100.0, Move.WAIT),
        (SEEN, 114.9, Move.WAIT),
        (SEEN, 115.0, Move.TAKE),
        (Seen(**{**{f: getattr(SEEN, f) for f in SEEN.__slots__}, "holder": ""}), 100.0, Move.TAKE),
        (Seen(**{**{f: getattr(SEEN, f) for f in SEEN.__slots__}, "holder": "me"}), 999.0, Move.RENEW),
    ],
)
def test_the_move_follows_from_what_was_seen_and_when(seen: Seen | None, now_s: float, move: Move) -> None:
    assert decide(seen, identity="me", now_s=now_s) is move


def test_only_a_change_of_what_it_says_counts_as_a_sign_of_life() -> None:
    assert observe(manifest(), SEEN, at_s=110.0) == SEEN
    relabelled = observe(manifest(version="8"), SEEN, at_s=110.0)
    assert (relabelled.since_s, relabelled.version) == (100.0, "8")
    assert observe(manifest(version="8", renewTime="t2"), SEEN, at_s=110.0).since_s == 110.0


def test_taking_the_lease_counts_a_transition_and_renewing_keeps_its_acquire_time() -> None:
    taken = lease_spec(Move.TAKE, SEEN, identity="me", lease_s=15.0, now="t9")
    assert taken == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 15,
        "acquireTime": "t9",
        "renewTime": "t9",
        "leaseTransitions": 3,
    }
    renewed = lease_spec(Move.RENEW, SEEN, identity="a", lease_s=15.0, now="t9")
    assert (renewed["acquireTime"], renewed["renewTime"], renewed["leaseTransitions"]) == ("t0", "t9", 2)
    assert lease_spec(Move.CREATE, None, identity="me", lease_s=15.0, now="t9")["leaseTransitions"] == 0


def test_the_first_leads_at_once_and_the_second_waits() -> None:
    async def story(contest: Contest) -> None:
        contest.replica("a")
        await asyncio.sleep(1.0)
        contest.replica("b")
        await asyncio.sleep(300.0)
        assert contest.leading == ["a"]
        assert contest.spec["holderIdentity"] == "a"

    in_virtual_time(story)


def test_it_is_given_back_at_the_end_and_taken_within_a_poll() -> None:
    async def story(contest: Contest) -> None:
        first = contest.replica("a")
        await asyncio.sleep(1.0)
        contest.replica("b")
        await asyncio.sleep(60.0)
        first.cancel()
        await asyncio.wait({first})
        assert first.cancelled()
        assert contest.spec["holderIdentity"] == ""
        await asyncio.sleep(3.0)
        assert contest.leading == ["b"]
        assert contest.spec["leaseTransitions"] == 1

    in_virtual_time(story)


def test_a_leader_that_vanishes_is_followed_when_its_lease_is_over() -> None:
    async def story(contest: Contest) -> None:
        contest.take("vanished")
        contest.replica("b")
        await asyncio.sleep(LEASE_S - 0.5)
        assert contest.leading == []
        await asyncio.sleep(1.5)
        assert contest.leading == ["b"]
        assert contest.spec["leaseTransitions"] == 4

    in_virtual_time(story)


@pytest.mark.parametrize("at_s", [-3600.0, 3600.0])
def test_the_times_in_the_lease_are_nobodys_business(at_s: float) -> None:
    """A clock that is an hour wrong neither loses its holder the Lease nor keeps it forever."""

    async def story(contest: Contest) -> None:
        for beat in range(10):
            contest.take("elsewhere", at_s=at_s + beat)
            if beat == 0:
                contest.replica("b")
            await asyncio.sleep(5.0)
            assert contest.leading == []
        await asyncio.sleep(LEASE_S - 1.0)
        assert contest.leading == ["b"]

    in_virtual_time(story)


@pytest.mark.parametrize("answer_s", [0.0, 2.5])
def test_a_leader_that_cannot_renew_stops_before_another_may_lead(answer_s: float) -> None:
    """Also when answers come late: the time counts from when the renewal was sent."""

    async def story(contest: Contest) -> None:
        weather = Weather(answer_s=answer_s)
        contest.replica("a", weather=weather)
        await asyncio.sleep(10.0)
        contest.replica("b")
        await asyncio.sleep(20.0)
        weather.down = True
        await asyncio.sleep(60.0)
        assert contest.leading == ["b"]
        assert contest.together == []

    contest = in_virtual_time(story)
    (_, _, stopped_s), (_, began_s, _) = contest.terms
    assert 30.0 + 10.0 - 2.2 - 2 * answer_s <= stopped_s <= 30.0 + 10.0
    assert began_s - stopped_s >= LEASE_S / 3 - 0.2


def test_a_short_outage_of_the_api_costs_no_leader() -> None:
    async def story(contest: Contest) -> None:
        weather = Weather()
        contest.replica("a", weather=weather)
        for _ in range(5):
            await asyncio.sleep(20.0)
            weather.down = True
            await asyncio.sleep(5.0)
            weather.down = False

    assert [(name, began_s < 1.0) for name, began_s, _ in in_virtual_time(story).terms] == [("a", True)]


def test_a_replica_that_lost_the_lease_contends_again() -> None:
    async def story(contest: Contest) -> None:
        weather = Weather()
        contest.replica("a", weather=weather)
        await asyncio.sleep(10.0)
        weather.down = True
        await asyncio.sleep(60.0)
        assert contest.leading == []
        weather.down = False
        await asyncio.sleep(20.0)
        assert contest.leading == ["a"]

    assert len(in_virtual_time(story).terms) == 2


def test_a_lease_taken_by_force_ends_the_term_at_the_next_renewal() -> None:
    async def story(contest: Contest) -> None:
        contest.replica("a")
        await asyncio.sleep(10.0)
        contest.take("usurper")
        await asyncio.sleep(2.5)
        assert contest.leading == []
        assert contest.spec["holderIdentity"] == "usurper"

    in_virtual_time(story)


def test_a_deleted_lease_is_no_invitation_while_its_holder_may_still_lead() -> None:
    async def story(contest: Contest) -> None:
        weather = Weather()
        contest.replica("a", weather=weather)
        contest.replica("b", seed=1)
        await asyncio.sleep(30.0)
        (holder,) = contest.leading
        weather.down = holder == "a"
        contest.store.delete(LEASE, uid=None)
        await asyncio.sleep(60.0)
        assert len(contest.leading) == 1
        assert contest.together == []

    in_virtual_time(story)


def test_what_the_work_raises_ends_it_and_gives_the_lease_back() -> None:
    async def fails() -> None:
        await asyncio.sleep(5.0)
        raise RuntimeError("a bug")

    async def story(contest: Contest) -> None:
        task = contest.replica("a", work=fails)
        with pytest.raises(RuntimeError, match="a bug"):
            await task
        assert contest.spec["holderIdentity"] == ""

    in_virtual_time(story)


def test_a_term_counts_from_before_the_renewal_was_sent() -> None:
    async def story(contest: Contest) -> None:
        port = WeatherPort(contest.store, Weather(answer_s=2.5), random.Random(1))
        clock = SkewedClock(contest.loop)
        candidate = _Candidate(port, clock, random.Random(1), identity="a", ref=LEASE, lease_s=LEASE_S, renew_s=RENEW_S)
        await candidate.acquire()
        assert clock.steady_s() > 2.5
        assert candidate._until_s <= 0.3 + LEASE_S * DEADLINE_RATIO

    in_virtual_time(story)
