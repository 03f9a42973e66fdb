"""Two launchers at one place within one attempt: no rank starts twice."""

from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import Outcome
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.messages import Finish
from tests.unit.launcher.launch_scenes import Leader, releases, view


def test_another_launcher_of_a_released_place_is_not_released_and_the_attempt_fails() -> None:
    leader = Leader().released()
    leader.feed(l.PeerLost(index=1, replacement=0))
    leader.connected(1)
    assert releases(leader.joined(1, 1, launcher="another")) == []
    assert leader.record.outcome is Outcome.FAILED
    assert "worker 1" in leader.record.message
    leader.feed(l.PeerLost(index=1, replacement=0))
    leader.connected(1)
    assert leader.joined(1, 1, launcher="another") == []
    assert leader.feed(l.JobChanged(attempt=view(2)))
    for index in range(2):
        leader.joined(index, 2, launcher="another")
    assert leader.record.outcome is None
    leader.fixed(2)
    assert leader.record.released


def test_a_launcher_that_joins_before_the_release_takes_the_place() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view(1)))
    for index in range(2):
        leader.joined(index, 1)
    leader.fixed(1)
    leader.feed(l.PeerLost(index=1, replacement=0))
    leader.connected(1)
    assert leader.joined(1, 1, launcher="another") == []
    assert releases(leader.written()) == [1]
    assert releases(leader.joined(1, 1, launcher="another")) == [1]


def test_a_leader_whose_attempt_another_has_begun_ends_with_its_pod_and_releases_nothing() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view(1)))
    for index in range(2):
        leader.joined(index, 1, launcher="from before", forked=index == 1)
    assert leader.feed(l.Fenced(attempt=1)) == [l.SendTo(index=0, message=Finish(code=ExitCode.FENCED))]
    assert leader.fixed(1) == leader.written() == []
    assert not leader.record.released


def test_what_was_taken_of_an_older_attempt_is_of_no_matter() -> None:
    leader = Leader()
    for index in range(2):
        leader.connected(index)
    leader.feed(l.JobChanged(attempt=view(2)))
    assert leader.feed(l.Fenced(attempt=1)) == []
    for index in range(2):
        leader.joined(index, 2)
    leader.fixed(2)
    assert releases(leader.written()) == [2]
