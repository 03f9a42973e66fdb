"""Checks of nodes before an attempt is released: the leader's rounds, and what a follower does."""

from __future__ import annotations

import dataclasses

import pytest

from polyreme_api.progress import Outcome
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.check_rounds import (
    ROUNDS_MAX,
    WARM_S,
    CheckOrder,
    Rounds,
    advance,
    met,
    parse_report,
    render_report,
    report_of,
)
from polyreme_launcher.protocol.check_verdict import Finding, Measured
from polyreme_launcher.protocol.messages import Check, Checked, Directive, Release
from tests.unit.launcher.launch_scenes import Leader, releases, view

GOOD = {"Compute": 100.0, "Memory": 50.0, "Disk": 10.0}
ORDER = CheckOrder(timeout_s=80.0)
Nodes = dict[int, str]
"""Faults by worker."""


def checks(effects: list[l.LeaderEffect]) -> dict[int, Check]:
    return {
        effect.index: effect.message
        for effect in effects
        if isinstance(effect, l.SendTo) and isinstance(effect.message, Check)
    }


def gathered(replicas: int, order: CheckOrder) -> tuple[Leader, list[l.LeaderEffect]]:
    leader = Leader()
    for index in range(replicas):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view(replicas=replicas, checks=order)))
    effects: list[l.LeaderEffect] = []
    for index in range(replicas):
        effects += leader.joined(index, 1)
    return leader, effects


def measure(index: int, check: Check, faults: Nodes) -> Measured | None:
    """Answer a check as a worker would; None: it hangs."""
    if any(faults.get(one) == "hangs" for one in (index, *check.partners)):
        return None
    if check.partners:
        bad = any(faults.get(one) == "network" for one in check.partners)
        return Measured(failed={"AllReduce": "reset"}) if bad else Measured(rates={"AllReduce": 9.0})
    slow = faults.get(index) == "slow"
    return Measured(rates={name: rate / (4.0 if slow and name == "Compute" else 1.0) for name, rate in GOOD.items()})


def play(leader: Leader, effects: list[l.LeaderEffect], faults: Nodes) -> list[l.LeaderEffect]:
    """Answer everything that the leader asks until it has a verdict; return the effects of the last answer."""
    for _ in range(50):
        meeting = [effect for effect in effects if isinstance(effect, l.MeetForChecks)]
        asked = checks(effects)
        if not meeting and not asked:
            if leader.state.checks is None or leader.state.checks.done:
                return effects
            leader.now_s += ORDER.round_s + WARM_S
            leader.tick()
            leader.now_s += ORDER.round_s + WARM_S
            effects = leader.tick()
            continue
        effects = []
        for request in meeting:
            effects += leader.feed(
                l.ChecksMeet(attempt=request.attempt, serial=request.serial, address="127.0.0.1", port=7)
            )
        for index, check in asked.items():
            answer = measure(index, check, faults)
            if answer is not None:
                effects += leader.say(index, Checked(attempt=1, serial=check.serial, report=render_report(answer)))
    raise AssertionError("the checks never end")


def test_an_attempt_is_released_only_after_its_checks() -> None:
    leader, effects = gathered(3, ORDER)
    assert not any(isinstance(effect, l.FixResume) for effect in effects)
    assert leader.record.pre_check is not None
    assert leader.record.pre_check.waits == "checking nodes: compute, memory and disk; waits for workers 0, 1, 2"
    last = play(leader, effects, {})
    assert any(isinstance(effect, l.FixResume) for effect in last)
    leader.fixed(1)
    assert releases(leader.written()) == [1]
    report = leader.record.pre_check
    assert (report.done, report.passed, report.failed, report.warning) == (True, ((0, 3),), (), "")


@pytest.mark.parametrize("fault", ["slow", "hangs", "network"])
@pytest.mark.parametrize("bad", range(4))
def test_a_bad_worker_is_named_and_the_attempt_is_not_released(bad: int, fault: str) -> None:
    leader, effects = gathered(4, ORDER)
    play(leader, effects, {bad: fault})
    leader.tick()
    assert leader.record.outcome is Outcome.FAILED
    assert not leader.state.fixing
    report = leader.record.pre_check
    assert report is not None
    assert [(each.index, each.reason) for each in report.failed] == [
        (bad, {"slow": "PreCheckComputeSlow", "hangs": "PreCheckCompute", "network": "PreCheckAllReduce"}[fault])
    ]
    assert f"worker {bad}: " in leader.record.message
    assert sum(count for _, count in report.passed) == 3


def test_after_the_most_moves_it_trains_and_warns() -> None:
    leader, effects = gathered(3, CheckOrder(timeout_s=80.0, warn_only=True))
    last = play(leader, effects, {1: "slow"})
    assert any(isinstance(effect, l.FixResume) for effect in last)
    assert leader.record.outcome is None
    report = leader.record.pre_check
    assert report is not None
    assert [each.index for each in report.failed] == [1]


def test_workers_whose_node_has_passed_are_partners_only() -> None:
    _, effects = gathered(6, CheckOrder(timeout_s=80.0, passed=frozenset({0, 1, 2, 3, 4})))
    assert [*checks(effects)] == [0, 1, 5]
    leader, effects = gathered(2, CheckOrder(timeout_s=80.0, passed=frozenset({0, 1})))
    assert not checks(effects)
    assert any(isinstance(effect, l.FixResume) for effect in effects)
    assert leader.record.pre_check is None or leader.record.pre_check.done


def test_a_worker_that_loses_its_connection_is_not_blamed_and_the_checks_begin_again() -> None:
    leader, effects = gathered(3, ORDER)
    first = checks(effects)[0].serial
    leader.feed(l.PeerLost(index=1, replacement=0))
    leader.now_s += 1.0
    leader.tick()
    leader.now_s += 200.0
    leader.tick()
    assert leader.record.outcome is None
    leader.connected(1)
    again = checks(leader.joined(1, 1))
    assert [check.serial for check in again.values()] == [first + 1] * 3
    late = leader.say(0, Checked(attempt=1, serial=first, report=render_report(Measured(wrong={"Compute": "1"}))))
    assert late == []


def test_a_report_that_cannot_be_read_is_a_failed_check() -> None:
    leader, effects = gathered(3, ORDER)
    for index, check in checks(effects).items():
        report = '{"rates": 7}' if index == 2 else render_report(Measured(rates=GOOD))
        effects = leader.say(index, Checked(attempt=1, serial=check.serial, report=report))
    play(leader, effects, {})
    assert leader.record.pre_check is not None
    assert [each.message for each in leader.record.pre_check.failed] == ["compute: its report can't be read"]


def follower(attempt: int = 1) -> f.FollowerState:
    state = f.FollowerState(index=1, replacement=0, devices=2)
    state, _ = f.FollowerMachine.step(state, f.LeaderConnected(), 0.0)
    return tell(state, directive(attempt))[0]


def directive(attempt: int, *, run: bool = True) -> Directive:
    return Directive(attempt=attempt, run=run, checkpoint_requested=False, replacement=0, job_json="{}", plan_json="{}")


def tell(
    state: f.FollowerState, message: Directive | Check | Release
) -> tuple[f.FollowerState, tuple[f.FollowerEffect, ...]]:
    return f.FollowerMachine.step(state, f.FromLeader(message=message), 0.0)


def check(serial: int = 1) -> Check:
    return Check(attempt=1, serial=serial, partners=(), address="", port=0, seconds=5)


def test_a_follower_runs_each_check_once_and_repeats_its_report() -> None:
    state, effects = tell(follower(), check())
    assert effects == (f.RunCheck(check=check()),)
    state, effects = tell(state, check())
    assert effects == ()
    state, effects = f.FollowerMachine.step(state, f.CheckEnded(attempt=1, serial=1, report="{}"), 0.0)
    answer = f.SendToLeader(message=Checked(attempt=1, serial=1, report="{}"))
    assert effects == (answer,)
    state, effects = tell(state, check())
    assert effects == (answer,)
    _, effects = f.FollowerMachine.step(tell(state, check(2))[0], f.CheckEnded(attempt=1, serial=1, report="{}"), 0.0)
    assert effects == (), "a late report of an older check"


def test_no_process_of_a_check_lives_beside_ranks_or_a_later_attempt() -> None:
    state, _ = tell(follower(), check())
    release = Release(attempt=1, master_address="127.0.0.1", master_port=1, resume_from=None)
    released, effects = tell(state, release)
    assert [type(effect) for effect in effects] == [f.StopChecks, f.ForkRanks]
    assert tell(released, check(2))[1] == ()
    for message in (directive(2), directive(1, run=False)):
        assert any(isinstance(effect, f.StopChecks) for effect in tell(state, message)[1])


def test_a_report_keeps_what_was_wrong() -> None:
    said = Measured(rates={"Compute": 2.0}, failed={"Disk": "full"}, wrong={"Memory": "bit 3"})
    assert parse_report(render_report(said)) == said


def test_a_place_to_meet_is_taken_once_and_of_this_round_only() -> None:
    waiting = Rounds(indices=(0, 1), number=1, serial=2, pairs=((0, 1),))
    assert met(waiting, 1, "a", 7) == waiting, "of an earlier round"
    placed = met(waiting, 2, "a", 7)
    assert (placed.address, placed.port) == ("a", 7)
    assert met(placed, 2, "b", 8) == placed


def test_a_report_names_passed_and_failed_workers_only_when_the_checks_are_done() -> None:
    bad = {0: Finding(index=0, reason="Compute", why="slow")}
    running = Rounds(indices=(0, 1), bad=bad)
    assert (report_of(running).passed, report_of(running).failed) == ((), ())
    done = report_of(dataclasses.replace(running, done=True))
    assert [finding.index for finding in done.failed] == [0]
    assert done.passed


def test_there_are_no_more_rounds_than_have_a_share_of_the_time() -> None:
    pairs = ((0, 1),)
    results = {index: Measured(rates={"AllReduce": 9.0}) for index in (0, 1)}
    last = Rounds(indices=(0, 1), number=ROUNDS_MAX - 1, serial=9, pairs=pairs, reports=results, waves=(pairs,))
    assert advance(last, ORDER).done
