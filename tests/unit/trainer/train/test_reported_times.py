"""What rank 0 reports of its time, for the accounting: steps, waits for saves, evaluation."""

from polyreme_api.progress import ProgressRecord, RankPhase, StepRecord
from polyreme_launcher.protocol.records import with_rank_record
from polyreme_system.clock import SystemClock
from polyreme_trainer.train.records import Reporter


class SetClock(SystemClock):
    """A clock that a test moves."""

    at_s = 0.0

    def steady_s(self) -> float:
        return self.at_s

    def advance(self, by_s: float) -> None:
        self.at_s += by_s


class Sink:
    """Keeps the newest record, merged as the leader's launcher merges it."""

    newest = ProgressRecord(attempt=1)

    def report(self, record: ProgressRecord) -> None:
        self.newest = with_rank_record(self.newest, record)


def test_times_of_steps_saves_and_evaluation_add_up_and_reach_the_leader() -> None:
    clock, sink = SetClock(), Sink()
    reporter = Reporter(sink, clock, ProgressRecord(attempt=1))
    for step in (1, 2):
        reporter.step(StepRecord(attempt=1, step=step, loss=1.0, step_s=2.0, data_wait_s=0.5))
        with reporter.evaluating():
            clock.advance(5.0)
        with reporter.saving():
            clock.advance(0.25)
    reporter.phase(RankPhase.DONE)
    newest = sink.newest
    assert (newest.trained_seconds, newest.data_wait_seconds) == (4.0, 1.0)
    assert (newest.checkpoint_seconds, newest.evaluation_seconds) == (0.5, 10.0)
