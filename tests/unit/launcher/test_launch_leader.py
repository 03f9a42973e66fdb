"""The machine of a launcher that leads: the barrier, restarts, stops, fencing, success."""

from typing import Any

import pytest

from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankPhase, StallKind
from polyreme_api.rank_state import RankActivity, RankState, RankWait
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.hang_evidence import HangLimits
from polyreme_launcher.protocol.messages import Beat, Directive, Exited, Finish, Leaving, WriteStacks
from tests.unit.launcher.launch_scenes import Leader, releases, view, written


def test_the_leader_releases_when_every_index_has_joined_and_the_resume_point_is_fixed() -> None:
    leader = Leader()
    leader.connected(0)
    leader.feed(l.JobChanged(attempt=view()))
    assert leader.joined(0, 1) == []
    leader.connected(1)
    assert l.FixResume(attempt=1) in leader.joined(1, 1)
    assert releases(leader.joined(1, 1)) == []
    assert releases(leader.written()) == []
    assert releases(leader.fixed(1)) == []
    assert leader.record.released
    assert releases(leader.written()) == [1]


def test_workers_are_released_after_the_lease_write_and_again_on_reconnect() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view()))
    for index in range(2):
        leader.joined(index, 1)
    (before,) = written(leader.fixed(1))
    leader.feed(l.PeerLost(index=1, replacement=0))
    leader.connected(1)
    assert releases(leader.joined(1, 1)) == []
    assert releases(leader.feed(l.LeaseWritten(record=before))) == [1]
    assert releases(leader.feed(l.LeaseWritten(record=before))) == []
    leader.connected(1)
    assert releases(leader.joined(1, 1)) == [1]


def test_a_stop_that_comes_before_the_lease_says_released_ends_the_attempt_at_once() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view()))
    for index in range(2):
        leader.joined(index, 1)
    leader.fixed(1)
    leader.feed(l.JobChanged(attempt=view(run=False)))
    assert leader.record.outcome is Outcome.STOPPED
    assert releases(leader.written()) == []


def test_a_worker_that_a_resize_drops_is_asked_to_finish() -> None:
    leader = Leader().released(replicas=3)
    effects = leader.feed(l.JobChanged(attempt=view(2, replicas=2, replacements={2: 1})))
    end = [l.SendTo(index=2, message=Finish(code=0)), l.DropPeer(index=2, replacement=0)]
    assert effects[:2] == end
    assert leader.connected(2)[-1] == end[-1]


def test_a_peer_that_leaves_before_the_release_must_join_again() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view()))
    leader.joined(0, 1)
    leader.joined(1, 1)
    leader.feed(l.PeerLost(index=1, replacement=0))
    leader.fixed(1)
    assert releases(leader.written()) == []
    leader.connected(1)
    leader.joined(1, 1)
    assert releases(leader.written()) == [1]


def test_a_follower_that_connects_again_before_the_release_must_join_again() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view()))
    leader.joined(0, 1)
    leader.joined(1, 1)
    leader.connected(1)  # its earlier connection broke, and the leader has not noticed yet
    assert leader.state.joined == {0}
    assert leader.record.joined == 1
    leader.fixed(1)
    assert releases(leader.written()) == []
    leader.joined(1, 1)
    assert releases(leader.written()) == [1]


def test_a_join_of_another_attempt_does_not_count() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view(2)))
    leader.joined(0, 2)
    assert leader.joined(1, 1) == []
    assert leader.state.joined == {0}


def test_a_late_joiner_of_an_old_replacement_is_refused() -> None:
    leader = Leader()
    leader.connected(0)
    leader.feed(l.JobChanged(attempt=view(2, replacements={1: 1})))
    told, dropped = leader.connected(1, replacement=0)
    assert isinstance(told, l.SendTo)
    assert isinstance(told.message, Directive)
    assert told.message.replacement == 1, "it learns that another pod has its place"
    assert dropped == l.DropPeer(index=1, replacement=0)
    leader.connected(1, replacement=1)
    leader.joined(0, 2)
    assert leader.joined(1, 2, replacement=0) == []
    assert l.FixResume(attempt=2) in leader.joined(1, 2, replacement=1)


def test_a_resume_point_of_an_older_attempt_releases_nothing() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view(1)))
    leader.joined(0, 1)
    leader.joined(1, 1)
    leader.feed(l.JobChanged(attempt=view(2)))
    leader.joined(0, 2)
    leader.joined(1, 2)
    leader.fixed(1)
    assert releases(leader.written()) == []
    leader.fixed(2)
    assert releases(leader.written()) == [2]


def test_a_checkpoint_root_that_refuses_is_on_the_lease_as_a_wrong_configuration() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view()))
    leader.joined(0, 1)
    leader.joined(1, 1)
    (record,) = written(leader.feed(l.AttemptRefused(attempt=1, message="another format")))
    assert [(found.rank, found.code) for found in record.exits] == [(0, 2)]
    assert record.message == "another format"
    assert not leader.record.released


def test_a_refused_attempt_is_followed_by_nothing_but_the_next_one() -> None:
    leader = Leader().released()
    (record,) = written(leader.feed(l.AttemptRefused(attempt=2, message="plan is another", code=7)))
    assert (record.attempt, record.message, record.outcome) == (2, "plan is another", Outcome.FAILED)
    assert [found.code for found in record.exits] == [7]
    for late in (l.JobChanged(attempt=view(2)), l.JobChanged(attempt=view(1))):
        assert leader.feed(late) == []
    for index in range(2):
        assert releases(leader.joined(index, 2)) == []
    assert releases(leader.fixed(2)) == []
    leader.feed(l.JobChanged(attempt=view(3)))
    for index in range(2):
        leader.joined(index, 3)
    leader.fixed(3)
    assert releases(leader.written()) == [3]


def test_a_refusal_that_comes_late_does_not_hurt_a_released_attempt() -> None:
    leader = Leader().released(2)
    state = leader.state
    for number in (1, 2):
        assert leader.feed(l.AttemptRefused(attempt=number, message="late")) == []
    assert leader.state == state


def test_the_first_ranks_own_words_stay_on_the_lease() -> None:
    leader = Leader().released()
    said = Exited(attempt=1, rank=1, code=2, signal=None, message="no such model: 'x'")
    (record,) = written(leader.say(1, said))
    assert record.message == "no such model: 'x'"
    leader.feed(l.ProgressFromRank(record=ProgressRecord(attempt=1, step=7)))
    lost = Exited(attempt=1, rank=0, code=1, signal=None, message="connection closed by peer")
    leader.say(0, lost)
    assert (leader.record.step, leader.record.message) == (7, "no such model: 'x'")


def test_a_signal_is_not_explained_by_what_it_did_to_others() -> None:
    leader = Leader().released()
    leader.exited(1, code=None, number=9)
    leader.say(0, Exited(attempt=1, rank=0, code=1, signal=None, message="connection closed by peer"))
    assert leader.record.message == ""


def test_an_older_attempt_read_late_changes_nothing() -> None:
    leader = Leader().released(2)
    state = leader.state
    assert leader.feed(l.JobChanged(attempt=view(1))) == []
    assert leader.state == state


def test_a_rank_that_dies_is_on_the_lease_at_once() -> None:
    leader = Leader().released()
    (record,) = written(leader.exited(1, code=None, number=9))
    assert [(found.rank, found.code, found.signal) for found in record.exits] == [(1, None, 9)]
    assert record.outcome is None


def test_success_needs_every_rank_and_the_last_record() -> None:
    leader = Leader().released()
    leader.feed(l.ProgressFromRank(record=ProgressRecord(attempt=1, phase=RankPhase.DONE, step=5)))
    leader.exited(0)
    assert leader.record.outcome is None
    (record,) = written(leader.exited(1))
    assert record.outcome is Outcome.SUCCEEDED
    assert leader.feed(l.LeaseWritten(record=record)) == [l.Broadcast(message=Finish(code=0))]


def test_ranks_that_exit_0_without_a_last_record_have_not_succeeded() -> None:
    leader = Leader().released()
    leader.exited(0)
    leader.exited(1)
    assert leader.record.outcome is Outcome.FAILED


def test_the_launchers_end_only_once_the_success_is_on_the_lease() -> None:
    leader = Leader().released()
    leader.feed(l.ProgressFromRank(record=ProgressRecord(attempt=1, phase=RankPhase.DONE)))
    effects = leader.exited(0) + leader.exited(1)
    assert not any(isinstance(effect, l.Broadcast) and isinstance(effect.message, Finish) for effect in effects)


def test_a_stop_of_running_ranks_is_over_when_all_have_ended_and_is_no_failure() -> None:
    leader = Leader().released()
    leader.feed(l.JobChanged(attempt=view(run=False, checkpoint_requested=True)))
    leader.exited(0, code=75)
    assert not leader.record.outcome
    leader.exited(1, code=75)
    assert leader.record.outcome is Outcome.STOPPED
    assert leader.record.exits == ()


def test_a_stop_before_the_release_is_over_at_once() -> None:
    leader = Leader()
    leader.connected(0)
    leader.feed(l.JobChanged(attempt=view(run=False)))
    assert leader.record.outcome is Outcome.STOPPED


def test_a_progress_record_of_another_attempt_is_not_taken() -> None:
    leader = Leader().released(2)
    leader.feed(l.ProgressFromRank(record=ProgressRecord(attempt=1, phase=RankPhase.DONE, step=9)))
    assert (leader.record.step, leader.record.phase) == (0, RankPhase.STARTING)


def test_steps_wait_for_the_next_renewal_and_a_checkpoint_does_not() -> None:
    leader = Leader().released()
    training = ProgressRecord(attempt=1, phase=RankPhase.TRAINING, step=1)
    assert written(leader.feed(l.ProgressFromRank(record=training)))
    assert leader.feed(l.ProgressFromRank(record=training.model_copy(update={"step": 2}))) == []
    saved = training.model_copy(update={"step": 3, "checkpoint": CheckpointRef(attempt=1, step=3)})
    assert written(leader.feed(l.ProgressFromRank(record=saved)))
    leader.feed(l.ProgressFromRank(record=training.model_copy(update={"step": 4})))
    assert leader.record.checkpoint == CheckpointRef(attempt=1, step=3)
    leader.now_s = 2.0
    assert [record.step for record in written(leader.feed(f.Tick()))] == [4]


def test_a_leader_whose_place_another_pod_fills_ends_only_itself() -> None:
    leader = Leader().released()
    effects = leader.feed(l.JobChanged(attempt=view(2, replacements={0: 1})))
    assert effects == [l.SendTo(index=0, message=Finish(code=17))]
    assert leader.feed(f.Tick()) == []
    fenced = Leader().released()
    assert fenced.feed(l.Fenced()) == [l.SendTo(index=0, message=Finish(code=17))]


def test_a_worker_that_leaves_ends_the_attempt_once_its_own_ranks_have_stopped() -> None:
    leader = Leader().released()
    leader.say(1, Leaving())
    leader.exited(0, code=75)
    assert not leader.record.exits, "an attempt that began now would lack worker 1 a moment later"
    leader.exited(1, code=75)
    assert [(end.rank, end.code) for end in leader.record.exits] == [(1, 75)]
    assert leader.record.leaving == (1,)


def test_a_worker_that_leaves_hides_no_failure() -> None:
    leader = Leader().released()
    leader.say(1, Leaving())
    leader.exited(0, code=None, number=9)
    assert [(end.rank, end.signal) for end in leader.record.exits] == [(0, 9)]


@pytest.mark.parametrize("found", ["the lost rank", "every rank", "nothing"])
def test_exits_of_ranks_that_lost_another_wait_for_what_shows_the_cause(found: str) -> None:
    leader = Leader().released()
    leader.now_s = 10.0
    leader.exited(0, code=7)
    leader.now_s = 10.0 + l.CAUSE_WAIT_S - 0.1
    leader.feed(f.Tick())
    assert not leader.record.exits, "an attempt that began now would lack worker 1 a moment later"
    match found:
        case "the lost rank":
            leader.exited(1, code=None, number=9)
            wanted = [(0, 7, None), (1, None, 9)]
        case "every rank":
            leader.exited(1, code=7)
            wanted = [(0, 7, None), (1, 7, None)]
        case _:
            leader.now_s += 0.2
            leader.feed(f.Tick())
            wanted = [(0, 7, None)]
    assert [(end.rank, end.code, end.signal) for end in leader.record.exits] == wanted
    leader.feed(l.PeerConnected(index=1, replacement=0))
    assert len(leader.record.exits) == len(wanted), "what was reported stays"


def beat(rank: int, **state: Any) -> Beat:
    state = {"activity": RankActivity.STEP, "step": 8, "quiet_ms": 10**6} | state
    return Beat(ranks=RankState(rank=rank, **state).numbers())


def test_what_launchers_see_of_their_ranks_is_on_the_lease_from_the_release_to_the_first_exit() -> None:
    leader = Leader()
    leader.connected(0)
    leader.feed(l.JobChanged(attempt=view(replicas=1)))
    leader.say(0, beat(0))
    assert leader.record.watched_ranks is None
    leader = Leader().released()
    leader.say(0, beat(0))
    leader.say(1, beat(1, stopped=True))
    assert (leader.record.watched_ranks, leader.record.stopped) == (2, (1,))
    leader.exited(0, code=7)
    leader.say(1, Beat())
    assert leader.record.stopped == (1,), "what was seen when the first rank ended"
    leader = Leader().released()
    leader.say(1, beat(1, stopped=True))
    leader.say(1, Beat())
    assert (leader.record.watched_ranks, leader.record.stopped) == (0, ())


def stalled(leader: Leader, *, seconds: int) -> list[l.LeaderEffect]:
    """Let time pass in which rank 0 waits for rank 1, and neither advances."""
    effects = []
    for _ in range(seconds):
        leader.now_s += 1.0
        leader.say(0, beat(0, wait=RankWait.EXCHANGE))
        leader.say(1, beat(1))
        effects += leader.tick()
    return effects


def test_a_stall_asks_each_rank_for_its_stacks_once_and_is_confirmed_by_a_later_look() -> None:
    leader = Leader().released(hang_limits=HangLimits(step_s=20.0))
    assert [effect for effect in stalled(leader, seconds=20) if isinstance(effect, l.Broadcast)] == [
        l.Broadcast(message=Beat())
    ] * 10
    assert leader.record.stall is None
    effects = stalled(leader, seconds=1)
    assert l.Broadcast(message=WriteStacks(attempt=1)) in effects
    assert written(effects)[0].stall == leader.record.stall, "the Lease is written at once"
    assert leader.record.stall is not None
    assert (leader.record.stall.kind, leader.record.stall.suspects) == (StallKind.OUTSIDE, (1,))
    assert not leader.record.stall.confirmed
    assert l.Broadcast(message=WriteStacks(attempt=1)) not in stalled(leader, seconds=3)
    assert leader.record.stall.confirmed
    leader.say(1, beat(1, moves=1))
    leader.tick()
    assert leader.record.stall is None


def test_the_rank_that_others_gave_up_waiting_for_is_on_the_record_with_their_exits() -> None:
    leader = Leader().released()
    stalled(leader, seconds=12)
    leader.exited(0, code=7)
    assert leader.record.stall is not None
    assert leader.record.stall.suspects == (1,)
    leader = Leader().released()
    stalled(leader, seconds=4)
    leader.exited(0, code=7)
    assert leader.record.stall is None, "it lost a rank rather than wait in vain"


def test_a_rank_that_hangs_in_its_export_is_found_after_the_others_have_ended() -> None:
    leader = Leader().released(hang_limits=HangLimits(step_s=20.0, first_step_s=20.0))
    leader.exited(0, code=0)
    for _ in range(26):
        leader.now_s += 1.0
        leader.say(1, beat(1, activity=RankActivity.EXPORTING, idle=True))
        leader.say(0, Beat())
        leader.tick()
    assert leader.record.stall is not None
    assert (leader.record.stall.kind, leader.record.stall.confirmed) == (StallKind.IDLE, True)


def silent(leader: Leader, *, seconds: int, tick_s: float = 1.0) -> None:
    """Let time pass in which index 0 alone is heard."""
    begun_s = leader.now_s
    while leader.now_s < begun_s + seconds:
        leader.now_s += tick_s
        leader.say(0, Beat())
        leader.tick()


def test_a_follower_that_falls_silent_loses_its_place() -> None:
    leader = Leader().released()
    silent(leader, seconds=20)
    assert leader.record.outcome is None
    silent(leader, seconds=2)
    ended = leader.record
    assert (ended.outcome, ended.leaving) == (Outcome.FAILED, (1,))
    assert ended.message == "worker 1: its launcher has sent nothing for 20 s"


def test_a_leader_that_was_frozen_blames_no_worker() -> None:
    leader = Leader().released()
    silent(leader, seconds=60, tick_s=6.0)
    assert leader.record.outcome is None


def test_a_pod_that_the_attempt_does_not_expect_yet_does_not_join() -> None:
    leader = Leader()
    leader.connected(0)
    leader.feed(l.JobChanged(attempt=view(2)))
    leader.joined(0, 2)
    leader.connected(1, replacement=1)
    assert leader.joined(1, 2, replacement=1) == []
    assert leader.state.joined == {0}


def test_ranks_that_train_already_are_not_released_again() -> None:
    leader = Leader().released()
    assert releases(leader.joined(1, 1, forked=True)) == []
    assert releases(leader.joined(1, 1)) == [1], "its connection broke before it forked"


def test_a_connection_that_is_made_again_after_the_release_takes_no_join_back() -> None:
    leader = Leader().released()
    leader.connected(1)
    assert leader.state.joined == {0, 1}
