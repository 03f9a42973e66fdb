"""A job's budget at its bucket: shares never exceed it, and no window has more requests or bytes than its share."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from polyreme_datahub.loader.read.budget_rules import (
    NOTHING,
    RENEWAL,
    RENEWALS,
    RENEWED_EVERY_S,
    SKEW_S,
    Pace,
    Rate,
    Table,
    grows_late,
    renewed,
    usable,
)

HOLDERS = 5
BUDGET = Rate(100.0, 1e9)
LEASE_TTL_S = SKEW_S + RENEWALS * RENEWED_EVERY_S
ROUNDING = 1.0 + 1e-9

steps = st.lists(
    st.tuples(
        st.integers(0, HOLDERS - 1),
        st.sampled_from(["renew", "renew late", "forget"]),
        st.floats(0.0, 30.0),
    ),
    max_size=40,
)


@given(
    steps=steps,
    skew_s=st.lists(st.floats(-SKEW_S, SKEW_S), min_size=HOLDERS, max_size=HOLDERS),
    expected=st.integers(1, HOLDERS + 2),
)
def test_shares_in_use_never_exceed_the_budget(
    steps: list[tuple[int, str, float]], skew_s: list[float], expected: int
) -> None:
    """Processes that join, die, are slow, find an old table, or have a wrong clock."""
    stored, held, true_s = Table(), dict.fromkeys(range(HOLDERS), Table()), 1000.0
    read = dict(held)
    for number, act, passed_s in steps:
        true_s += passed_s
        if act == "forget":
            # Its process was replaced, and knows nothing; its lease lives on.
            held[number] = Table()
            continue
        read[number] = stored if act == "renew" else read[number]
        after = renewed(
            read[number],
            str(number),
            process=str(number),
            budget=BUDGET,
            wanted=BUDGET * (1.0 / expected),
            now_s=true_s + skew_s[number],
        )
        if after is not None and read[number].generation == stored.generation:
            stored = held[number] = after
        for moment_s in (true_s, true_s + LEASE_TTL_S / 2, true_s + LEASE_TTL_S):
            used = [usable(held[each].of(str(each)), now_s=moment_s + skew_s[each]) for each in range(HOLDERS)]
            assert sum(share.requests for share in used) <= BUDGET.requests * ROUNDING
            assert sum(share.bytes for share in used) <= BUDGET.bytes * ROUNDING


@given(joins=st.lists(st.integers(0, HOLDERS - 1), min_size=1, max_size=8))
def test_every_process_has_a_fair_share_after_two_rounds_of_renewals(joins: list[int]) -> None:
    stored, now_s = Table(), 0.0
    for number in joins:
        stored = renewed(stored, str(number), process="p", budget=BUDGET, wanted=BUDGET, now_s=now_s) or stored
    living = sorted(set(joins))
    for _ in range(2):
        now_s += RENEWED_EVERY_S
        for number in living:
            stored = renewed(stored, str(number), process="p", budget=BUDGET, wanted=BUDGET, now_s=now_s) or stored
    for number in living:
        lease = stored.of(str(number))
        assert lease is not None
        assert abs(lease.share.requests - BUDGET.requests / len(living)) < 1e-6


def test_the_share_of_a_dead_process_goes_to_the_others_when_its_lease_has_ended() -> None:
    stored = Table()
    for name in ("one", "two", "one", "two"):
        stored = renewed(stored, name, process=name, budget=BUDGET, wanted=BUDGET, now_s=0.0) or stored
    for now_s, requests in ((LEASE_TTL_S + SKEW_S - 0.1, 50.0), (LEASE_TTL_S + SKEW_S, 100.0)):
        after = renewed(stored, "one", process="one", budget=BUDGET, wanted=BUDGET, now_s=now_s)
        assert after is not None
        lease = after.of("one")
        assert lease is not None
        assert lease.share.requests == requests


@given(
    sizes=st.lists(st.integers(0, 500_000), max_size=60),
    pauses_s=st.lists(st.floats(0.0, 0.5), min_size=60, max_size=60),
    answers_s=st.lists(st.floats(0.0, 3.0), min_size=60, max_size=60),
    refused=st.lists(st.booleans(), min_size=60, max_size=60),
    share=st.builds(Rate, st.floats(1.0, 30.0), st.floats(100_000.0, 2_000_000.0)),
)
def test_no_second_has_more_than_the_share(
    sizes: list[int], pauses_s: list[float], answers_s: list[float], refused: list[bool], share: Rate
) -> None:
    """Whenever the requests and their bytes pass the server between being sent and answered."""
    pace, now_s = Pace(), 0.0
    under_way, passed = list[tuple[float, int]](), list[tuple[float, float, int]]()

    def answer_until(moment_s: float) -> None:
        for answered_s, number in sorted(under_way):
            if answered_s <= moment_s:
                pace.end(number, now_s=answered_s)
                under_way.remove((answered_s, number))

    for size, pause_s, answer_s, is_refused in zip(sizes, pauses_s, answers_s, refused, strict=False):
        now_s += pause_s
        for _ in itertools.repeat(None, 1_000):
            answer_until(now_s)
            asked = min(size, pace.largest(share))
            wait_s = pace.wait_s(share, asked, now_s=now_s)
            if wait_s <= 0.0:
                under_way.append((now_s + answer_s, pace.begin(asked)))
                passed.append((now_s, now_s + answer_s, asked))
                break
            now_s += wait_s
        else:
            raise AssertionError("a request waits for ever")
        if is_refused:
            pace.refused(now_s)
    for second_s in {moment for sent_s, answered_s, _ in passed for moment in (sent_s, answered_s)}:
        window = [size for sent_s, answered_s, size in passed if sent_s < second_s + 1.0 and answered_s >= second_s]
        assert len(window) <= share.requests
        assert sum(window) <= share.bytes


def test_refusals_halve_the_pace_and_quiet_raises_it_again() -> None:
    pace, share = Pace(), Rate(100.0, 1e6)
    for now_s in (0.0, 0.5, 1.0):
        pace.refused(now_s)
    assert pace.factor == 0.25
    for now_s in range(6, 200, 5):
        pace.wait_s(share, 1, now_s=float(now_s))
    assert pace.factor == 1.0


def test_clocks_that_are_as_wrong_as_allowed_never_let_two_processes_use_one_share() -> None:
    slow, fast = -SKEW_S, SKEW_S
    stored = renewed(Table(), "one", process="one", budget=BUDGET, wanted=BUDGET, now_s=slow)
    assert stored is not None
    first, both = stored.of("one"), list[Rate]()
    for tenth in range(800):
        true_s = tenth / 10
        after = renewed(stored, "two", process="two", budget=BUDGET, wanted=BUDGET, now_s=true_s + fast)
        assert after is not None
        second = after.of("two")
        both = [usable(first, now_s=true_s + slow), usable(second, now_s=true_s + fast)]
        assert sum(share.requests for share in both) <= BUDGET.requests
    assert both == [NOTHING, BUDGET - RENEWAL]


def test_a_successor_takes_over_a_dead_process_lease_after_a_delay() -> None:
    stored = renewed(Table(), "pod 0", process="first", budget=BUDGET, wanted=BUDGET * 0.5, now_s=1000.0)
    assert stored is not None
    assert not grows_late(stored, now_s=1000.0)
    after = renewed(stored, "pod 0", process="second", budget=BUDGET, wanted=BUDGET * 0.5, now_s=1001.0)
    assert after is not None
    assert [(each.process, each.share.requests) for each in after.leases] == [("second", 50.0)]
    assert grows_late(after, now_s=1001.0)
    assert not grows_late(after, now_s=1100.0)
