"""Which workers the checks before training name as bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from polyreme_launcher.protocol.check_verdict import (
    Limits,
    Measured,
    Pair,
    PairResult,
    bad_alone,
    bad_of_pairs,
    first_pairs,
    participants,
    second_waves,
    unexplained,
)

LIMITS = Limits()
GOOD = Measured(rates={"Compute": 100.0, "Memory": 50.0, "Disk": 10.0})
noise = st.floats(0.8, 1.2)
sizes = st.integers(2, 40)


def two_rounds(indices: list[int], check: Callable[[Pair], PairResult]) -> list[PairResult]:
    first = [check(pair) for pair in first_pairs(indices)]
    waves = second_waves(indices, first, LIMITS)
    for wave in waves:
        members = [index for pair in wave for index in pair]
        assert len(members) == len(set(members)), "the pairs of a wave are disjoint"
    return [*first, *(check(pair) for wave in waves for pair in wave)]


@given(st.data(), st.integers(3, 40), st.sampled_from(["slow", "hangs", "wrong"]))
def test_one_bad_worker_is_named_wherever_it_is(data: st.DataObject, size: int, how: str) -> None:
    indices = sorted(data.draw(st.sets(st.integers(0, 99), min_size=size, max_size=size)))
    bad = data.draw(st.sampled_from(indices))

    def check(pair: Pair) -> PairResult:
        rate = 100.0 * data.draw(noise)
        if bad in pair and how != "slow":
            return PairResult(pair=pair, why=how)
        return PairResult(pair=pair, rate=rate / 10.0 if bad in pair else rate)

    results = two_rounds(indices, check)
    assert [*bad_of_pairs(results, LIMITS)] == [bad]
    assert unexplained(results, {bad}, LIMITS) == ""


@given(st.data(), st.integers(3, 40))
def test_a_bad_link_between_two_good_workers_names_neither(data: st.DataObject, size: int) -> None:
    link = data.draw(st.sampled_from(first_pairs(range(size))))
    results = two_rounds(
        [*range(size)],
        lambda pair: PairResult(pair=pair, why="reset by peer") if pair == link else PairResult(pair=pair, rate=100.0),
    )
    assert bad_of_pairs(results, LIMITS) == {}
    assert f"workers {link[0]} and {link[1]} failed" in unexplained(results, set(), LIMITS)


@given(st.data(), sizes, st.floats(0.001, 1000.0))
def test_a_gang_that_is_slow_as_a_whole_has_no_bad_worker(data: st.DataObject, size: int, speed: float) -> None:
    measured = {
        index: Measured(rates={check: rate * speed * data.draw(noise) for check, rate in GOOD.rates.items()})
        for index in range(size)
    }
    assert bad_alone(measured, LIMITS) == ({}, "")
    results = two_rounds([*range(size)], lambda pair: PairResult(pair=pair, rate=speed * data.draw(noise)))
    assert bad_of_pairs(results, LIMITS) == {}


@given(st.data(), sizes, st.sampled_from(["slow", "undone", "wrong"]), st.sampled_from(sorted(GOOD.rates)))
def test_a_worker_that_fails_alone_is_named(data: st.DataObject, size: int, how: str, check: str) -> None:
    bad = data.draw(st.integers(0, size - 1))
    faults = {
        "slow": Measured(rates={**GOOD.rates, check: GOOD.rates[check] / 4}),
        "undone": Measured(failed={check: "timed out"}),
        "wrong": Measured(rates=GOOD.rates, wrong={check: "element 7 is 3, expected 4"}),
    }
    found, warning = bad_alone({**dict.fromkeys(range(size), GOOD), bad: faults[how]}, LIMITS)
    assert ([*found], warning) == ([bad], "")
    assert found[bad].reason.startswith(f"PreCheck{check}")
    assert check.lower() in found[bad].why


def test_a_check_that_most_workers_cannot_do_names_none() -> None:
    measured: Mapping[int, Measured] = dict.fromkeys(range(3), Measured(failed={"Disk": "read-only file system"}))
    assert bad_alone(measured, LIMITS) == ({}, "check Disk could not be done on 3 workers: read-only file system")


def test_a_minimum_holds_for_the_whole_gang() -> None:
    found, _ = bad_alone(dict.fromkeys(range(2), GOOD), Limits(minimums={"Memory": 60.0}))
    assert {index: finding.reason for index, finding in found.items()} == {0: "PreCheckMemory", 1: "PreCheckMemory"}
    assert found[0].why == "memory: 50 MB/s, the minimum is 60"


def test_two_workers_cannot_tell_which_of_them_is_bad() -> None:
    results = two_rounds([0, 1], lambda pair: PairResult(pair=pair, why="timed out"))
    assert bad_of_pairs(results, LIMITS) == {}
    assert "neither is known to be bad: timed out" in unexplained(results, set(), LIMITS)


@given(sizes, st.data())
def test_workers_that_have_passed_are_checked_only_as_partners(size: int, data: st.DataObject) -> None:
    passed = data.draw(st.sets(st.integers(0, size - 1)))
    checked = {*participants(size, passed)}
    due = {*range(size)} - passed
    assert due <= checked
    assert len(checked & passed) == (min(len(passed), max(2, len(due))) if due else 0)
