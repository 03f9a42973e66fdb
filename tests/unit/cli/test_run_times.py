"""Times of a run: one source, that no step of the clock and no hang makes contradict itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polyreme.report.run_report import figures
from polyreme.report.run_times import RunTimes, restart_s, run_times
from polyreme.run_files.records import RunRecords
from polyreme.run_files.timeline import Kind, Moment
from polyreme_api.history import ResumePoint
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.job.accounting import Accounting, TimeCell
from polyreme_api.progress import StepRecord

BEGAN_S = 1_760_000_000.0
STEADY_S = 500.0
HOUR_S = 3600.0


class SteppedClock:
    """A wall clock that is set by ``step_s`` at a time [s since the start], beside a steady one."""

    def __init__(self, *, step_s: float = 0.0, at_s: float = 0.0) -> None:
        self._step_s = step_s
        self._at_s = at_s

    def wall(self, passed_s: float) -> float:
        """The wall clock when so much time has passed."""
        return BEGAN_S + passed_s + (self._step_s if passed_s >= self._at_s else 0.0)

    def moment(self, kind: Kind, attempt: int, passed_s: float, text: str = "") -> Moment:
        """A moment as the serving process writes it."""
        at_s, steady_s = self.wall(passed_s), STEADY_S + passed_s
        return Moment(at_s=at_s, kind=kind, attempt=attempt, text=text, steady_s=steady_s, boot="b")

    def record(self, attempt: int, step: int, passed_s: float) -> StepRecord:
        """A step of a second, as a rank writes it."""
        at_s, steady_s = self.wall(passed_s), STEADY_S + passed_s
        return StepRecord(attempt=attempt, step=step, loss=1.0, step_s=1.0, ended_at_s=at_s, ended_steady_s=steady_s)


def job(*restarts: tuple[int, str], succeeded: bool = True) -> TrainingJob:
    """A job whose attempts ended by causes."""
    succeeded_s = {"type": "Succeeded", "status": "True", "reason": "Completed", "message": "trained"}
    return parse_job(
        {
            "apiVersion": "polyreme.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {
                "model": {"preset": "kimi-vl-nano"},
                "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
                "training": {"steps": 8, "packsPerStep": 4},
                "workers": {"replicas": 2, "devices": 2},
            },
            "status": {
                "conditions": [{**succeeded_s, "lastTransitionTime": "2026-01-01T00:00:00Z"}] if succeeded else [],
                "restartRecords": [
                    {"attempt": attempt, "at": "2026-01-01T00:00:00Z", "cause": cause, "scope": "RestartProcess"}
                    for attempt, cause in restarts
                ],
            },
        }
    )


def disturbed(clock: SteppedClock, cause: str, *, injected: bool = False) -> tuple[RunTimes, TrainingJob]:
    """Attempt 1 starts for 5 s, trains 6 steps, then none for 20 s; attempt 2 repeats two of them and ends at 40 s."""
    records = RunRecords(
        points=[ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from="a000001-s00000004")],
        steps={
            1: [clock.record(1, step, 5 + step) for step in range(1, 7)],
            2: [clock.record(2, step, 28 + step) for step in range(5, 9)],
        },
        checkpoints=(),
        evaluation=None,
    )
    moments = [
        clock.moment("attempt", 1, 0, "Start"),
        *([clock.moment("fault", 1, 11.5)] if injected else []),
        clock.moment("attempt", 2, 31, "RestartProcess"),
        clock.moment("finished", 2, 40),
    ]
    ended = job((1, cause))
    return run_times(ended, records, moments, now=clock.moment("now", 0, 50)), ended


CLOCKS = [SteppedClock(), *(SteppedClock(step_s=step_s, at_s=8) for step_s in (-HOUR_S, -3.0, 3.0, 30 * HOUR_S))]


@pytest.mark.parametrize("clock", CLOCKS, ids=["even", "back 1 h", "back 3 s", "on 3 s", "on 30 h"])
def test_every_figure_is_the_same_whatever_the_wall_clock_does(clock: SteppedClock) -> None:
    times, ended = disturbed(clock, "RankKilled")
    assert times.wall_s == pytest.approx(40)
    assert _kept(times) == pytest.approx(8 / 40)
    assert times.restart_s == pytest.approx(22)
    head = figures(ended, times)
    assert (head.wall_s, head.restart_s) == (times.wall_s, times.restart_s)
    assert head.goodput is None, "nothing is charged yet"


def test_the_goodput_of_a_run_is_that_of_its_account() -> None:
    times, ended = disturbed(SteppedClock(), "RankKilled")
    cells = [("Productive", "", 600), ("Recomputed", "RankKilled", 200), ("Queued", "NoCapacity", 900)]
    charged = [TimeCell(what=what, why=why, device_milliseconds=time) for what, why, time in cells]
    status = ended.status.model_copy(update={"accounting": Accounting(cells=charged)})
    assert figures(ended.model_copy(update={"status": status}), times).goodput == pytest.approx(0.75)


@pytest.mark.parametrize("clock", CLOCKS, ids=["even", "back 1 h", "back 3 s", "on 3 s", "on 30 h"])
def test_the_parts_add_up_to_the_wall_time_and_their_first_is_the_goodput(clock: SteppedClock) -> None:
    times, _ = disturbed(clock, "RankKilled")
    shares = {share.name: pytest.approx(share.seconds) for share in times.shares}
    assert shares == {
        "Retained steps": 8,
        "First start": 5,
        "Lost steps and the end of a failed attempt (RankKilled)": 22,
        "Restarting (RestartProcess)": 1,
        "Evaluating and exporting": 4,
    }


def test_time_that_retained_steps_waited_for_data_is_a_part_of_its_own_and_no_goodput() -> None:
    clock = SteppedClock()
    waited = [clock.record(1, step, 5 + step).model_copy(update={"data_wait_s": 0.25}) for step in (1, 2)]
    times = _times_of(waited, clock)
    shares = {share.name: share.seconds for share in times.shares}
    assert (shares["Retained steps"], shares["Steps waiting for data"]) == pytest.approx((1.5, 0.5))
    assert _kept(times) == pytest.approx(1.5 / times.wall_s)


def test_a_hang_is_called_one_and_not_a_start() -> None:
    times, _ = disturbed(SteppedClock(), "Hung")
    shares = {share.name: share.seconds for share in times.shares}
    assert shares["Hung: no steps until the restart"] == pytest.approx(20)
    assert shares["Lost steps and the end of a failed attempt (Hung)"] == pytest.approx(2)
    assert shares["First start"] == pytest.approx(5)


def test_a_restart_is_measured_from_its_fault_or_from_the_last_step_before_it() -> None:
    assert disturbed(SteppedClock(), "RankKilled", injected=True)[0].restart_s == pytest.approx(33 - 11.5)
    assert disturbed(SteppedClock(), "PodLost")[0].restart_s == pytest.approx(33 - 11)
    assert disturbed(SteppedClock(), "HostRestarted")[0].restart_s is None


def test_a_restart_that_has_not_trained_yet_is_not_measured() -> None:
    clock = SteppedClock()
    started = [clock.moment("attempt", 1, 0), clock.moment("attempt", 2, 12)]
    assert restart_s(started, {1: [clock.record(1, 1, 6)]}, causes={1: "PodLost"}) is None
    assert restart_s(started, {2: [clock.record(2, 1, 15)]}, causes={1: "PodLost"}) == pytest.approx(15)


def test_records_without_a_steady_clock_are_taken_by_the_wall_clock() -> None:
    clock = SteppedClock()
    old = [
        record.model_copy(update={"ended_steady_s": 0.0}) for record in (clock.record(1, 1, 6), clock.record(1, 2, 7))
    ]
    assert _kept(_times_of(old, clock)) == pytest.approx(2 / 10)


def test_a_run_that_was_stopped_says_so_and_not_that_it_failed() -> None:
    clock = SteppedClock()
    moments = [clock.moment("attempt", 1, 0, "Start"), clock.moment("attempt", 2, 100, "Resume")]
    records = RunRecords(
        points=[ResumePoint(attempt=1)], steps={1: [clock.record(1, 1, 6)]}, checkpoints=(), evaluation=None
    )
    times = run_times(job(succeeded=False), records, moments, now=clock.moment("now", 0, 101))
    assert {share.name: share.seconds for share in times.shares}["Stopped on request"] == pytest.approx(94)
    assert times.restart_s is None


def _kept(times: RunTimes) -> float:
    """Share of the time that the run was not stopped."""
    asked_s = sum(share.seconds for share in times.shares if share.name != "Stopped on request")
    return sum(share.seconds for share in times.shares if share.counts) / asked_s


def _times_of(records: Sequence[StepRecord], clock: SteppedClock) -> RunTimes:
    found = RunRecords(points=[ResumePoint(attempt=1)], steps={1: records}, checkpoints=(), evaluation=None)
    moments = [clock.moment("attempt", 1, 0, "Start"), clock.moment("finished", 1, 10)]
    return run_times(job(), found, moments, now=clock.moment("now", 0, 10))


@pytest.mark.parametrize("killed", [False, True], ids=["with a checkpoint", "at once"])
def test_hours_for_which_a_run_was_stopped_are_no_loss_of_goodput(*, killed: bool) -> None:
    clock = SteppedClock()
    steps = {1: [clock.record(1, 1, 10.0), clock.record(1, 2, 11.0)], 2: [clock.record(2, 3, HOUR_S + 15.0)]}
    moments = [
        clock.moment("attempt", 1, 0.0, "Start"),
        clock.moment("stopped", 1, 12.0),
        clock.moment("attempt", 2, HOUR_S, "Resume"),
        clock.moment("finished", 2, HOUR_S + 16.0),
    ]
    points = [ResumePoint(attempt=1, resume_from=None), ResumePoint(attempt=2, resume_from="a000001-s00000002")]
    records = RunRecords(points=points, steps=steps, checkpoints=(), evaluation=None)
    ended = job((1, "HostRestarted")) if killed else job()
    times = run_times(ended, records, moments, now=clock.moment("now", 0, HOUR_S + 20.0))
    assert times.wall_s == pytest.approx(HOUR_S + 16.0)
    assert _kept(times) == pytest.approx(3 / 27)
