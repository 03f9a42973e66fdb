"""The machine of a launcher that follows: joins, forks, stops, silence of its leader."""

import dataclasses
from typing import Any

from polyreme_api.rank_state import RankState, RankWait, states_of
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol.messages import Beat, Directive, Exited, Joined, Leaving, Message, Release


class Follower:
    """A follower whose effects are collected."""

    def __init__(self, *, index: int = 1, replacement: int = 0, devices: int = 2) -> None:
        self.state = f.FollowerState(index=index, replacement=replacement, devices=devices)
        self.now_s = 0.0
        self.feed(f.LeaderConnected())

    def feed(self, event: f.FollowerEvent) -> list[f.FollowerEffect]:
        self.state, effects = f.FollowerMachine.step(self.state, event, self.now_s)
        return list(effects)

    def hear(self, message: Message) -> list[f.FollowerEffect]:
        return self.feed(f.FromLeader(message=message))

    def exited(
        self, rank: int, *, attempt: int = 1, code: int | None = None, number: int | None = 9
    ) -> list[f.FollowerEffect]:
        return self.feed(f.RankExited(attempt=attempt, rank=rank, code=code, signal=number))

    def running(self, attempt: int = 1) -> "Follower":
        self.hear(directive(attempt))
        effects = self.hear(release(attempt))
        assert [type(effect) for effect in effects] == [f.ForkRanks]
        return self


def directive(attempt: int, **changes: Any) -> Directive:
    base = Directive(
        attempt=attempt, run=True, checkpoint_requested=False, replacement=0, job_json="{}", plan_json="{}"
    )
    return dataclasses.replace(base, **changes)


def release(attempt: int) -> Release:
    return Release(attempt=attempt, master_address="127.0.0.1", master_port=1, resume_from=None)


def joins(effects: list[f.FollowerEffect]) -> list[int]:
    messages = [effect.message for effect in effects if isinstance(effect, f.SendToLeader)]
    return [message.attempt for message in messages if isinstance(message, Joined)]


def test_a_follower_joins_a_new_attempt_only_when_its_old_ranks_are_dead() -> None:
    follower = Follower().running()
    assert follower.hear(directive(2)) == [f.KillRanks()]
    assert follower.hear(release(2)) == []
    assert joins(follower.exited(2)) == []
    assert joins(follower.exited(3)) == [2]
    assert [type(effect) for effect in follower.hear(release(2))] == [f.ForkRanks]


def test_a_release_that_comes_twice_forks_once() -> None:
    follower = Follower().running()
    assert follower.hear(release(1)) == []
    follower.exited(2)
    follower.exited(3)
    assert follower.hear(release(1)) == []


def test_a_follower_ignores_older_attempts() -> None:
    follower = Follower().running(2)
    assert follower.hear(directive(1)) == []
    assert follower.hear(release(1)) == []
    assert follower.state.attempt == 2


def test_a_stop_with_checkpoint_asks_and_one_without_kills() -> None:
    asked = Follower().running().hear(directive(1, run=False, checkpoint_requested=True))
    assert asked[0] == f.SignalRanks(signal=f.RankSignal.STOP)
    assert Follower().running().hear(directive(1, run=False))[0] == f.KillRanks()
    saved = Follower().running().hear(directive(1, checkpoint_requested=True))
    assert saved[0] == f.SignalRanks(signal=f.RankSignal.CHECKPOINT)


def test_a_silent_leader_costs_the_ranks_after_15_s_and_not_before() -> None:
    follower = Follower().running()
    follower.now_s = 15.0
    assert f.KillRanks() not in follower.feed(f.Tick())
    follower.now_s = 15.1
    assert follower.feed(f.Tick()) == [f.KillRanks()]


def test_a_follower_that_comes_back_says_again_which_ranks_ended() -> None:
    follower = Follower().running()
    follower.feed(f.LeaderLost())
    follower.exited(2)
    messages = [effect.message for effect in follower.feed(f.LeaderConnected()) if isinstance(effect, f.SendToLeader)]
    assert messages == [
        Joined(attempt=1, index=1, replacement=0, launcher="", forked=True),
        Exited(attempt=1, rank=2, code=None, signal=9),
    ]


def test_a_pod_whose_place_another_fills_kills_its_ranks_and_ends_fenced() -> None:
    follower = Follower().running()
    assert follower.hear(directive(2, replacement=1)) == [f.KillRanks()]
    follower.exited(2)
    assert follower.exited(3)[-1] == f.ExitProcess(code=17)


def test_a_stop_of_the_pod_checkpoints_and_a_second_one_kills() -> None:
    follower = Follower().running()
    first = follower.feed(f.StopRequested(grace_s=20))
    assert first == [f.SendToLeader(message=Leaving()), f.SignalRanks(signal=f.RankSignal.STOP)]
    assert follower.feed(f.StopRequested(grace_s=20)) == [f.KillRanks()]
    follower.exited(2)
    assert follower.exited(3)[-1] == f.ExitProcess(code=0)


def test_stopping_a_pod_whose_attempt_ends_kills_ranks_without_a_checkpoint_request() -> None:
    follower = Follower().running()
    follower.hear(directive(1, run=False))
    assert f.KillRanks() in follower.feed(f.StopRequested(grace_s=20))


def test_a_stop_of_the_pod_waits_for_a_checkpoint_until_its_grace_ends() -> None:
    follower = Follower().running()
    follower.hear(directive(1, checkpoint_requested=True))
    assert f.SignalRanks(signal=f.RankSignal.STOP) in follower.feed(f.StopRequested(grace_s=20))
    follower.now_s = 10.0
    follower.state = dataclasses.replace(follower.state, heard_at_s=10.0)
    assert f.KillRanks() not in follower.feed(f.Tick())
    follower.now_s = 20.0
    assert follower.feed(f.Tick()) == [f.KillRanks()]


def test_a_launcher_without_ranks_ends_at_once() -> None:
    assert Follower().feed(f.StopRequested(grace_s=20)) == [f.ExitProcess(code=0)]


def test_a_launcher_that_is_dropped_each_time_it_comes_keeps_no_rank_alive() -> None:
    follower = Follower().running()
    for second in range(1, 40):
        follower.now_s = float(second)
        follower.feed(f.LeaderConnected())
        follower.feed(f.LeaderLost())
        if f.KillRanks() in follower.feed(f.Tick()):
            break
    assert f.LEADER_SILENCE_MAX_S < second <= f.LEADER_SILENCE_MAX_S + 1


def test_a_follower_says_what_it_sees_of_the_ranks_of_the_current_attempt_only() -> None:
    state = f.FollowerState(index=0, replacement=0, devices=1)

    def feed(event: f.FollowerEvent) -> list[Message]:
        nonlocal state
        state, effects = f.FollowerMachine.step(state, event, 0.0)
        return [effect.message for effect in effects if isinstance(effect, f.SendToLeader)]

    feed(f.LeaderConnected())
    directive = Directive(attempt=1, run=True, checkpoint_requested=False, replacement=0, job_json="{}", plan_json="{}")
    feed(f.FromLeader(message=directive))
    feed(f.FromLeader(message=Release(attempt=1, master_address="a", master_port=1, resume_from=None)))
    assert feed(f.Tick()) == [Beat()]
    seen = RankState(rank=0, step=3, wait=RankWait.EXCHANGE, idle=True, stopped=True)
    feed(f.RanksSampled(states=(seen,)))
    (beat,) = feed(f.Tick())
    assert isinstance(beat, Beat)
    assert states_of(beat.ranks) == (seen,)
    feed(f.FromLeader(message=dataclasses.replace(directive, attempt=2)))
    assert feed(f.Tick()) == [Beat()]


def test_a_follower_with_live_ranks_of_an_older_attempt_has_not_joined_when_it_connects_again() -> None:
    follower = Follower().running()
    follower.hear(directive(2))
    follower.feed(f.LeaderLost())
    assert joins(follower.feed(f.LeaderConnected())) == []
    follower.exited(2)
    assert joins(follower.exited(3)) == [2]


def test_a_directive_without_a_checkpoint_request_signals_no_rank() -> None:
    follower = Follower().running()
    assert not any(isinstance(effect, f.SignalRanks) for effect in follower.hear(directive(1, job_json="{ }")))
    asked = follower.hear(directive(1, checkpoint_requested=True))
    assert f.SignalRanks(signal=f.RankSignal.CHECKPOINT) in asked
    again = follower.hear(directive(1, checkpoint_requested=True, job_json="{}"))
    assert f.SignalRanks(signal=f.RankSignal.CHECKPOINT) not in again
