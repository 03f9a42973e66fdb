"""Times of a run: attempts, what each was spent on, and the longest restart.

The one source of every duration that the report and the commands show; goodput is that of the job's account, which
charges devices and not the wall clock. All of them come from the ranks' step records
and from the moments that the serving process saw, on a clock that never steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polyreme.report.data import AttemptRow, TimeShare
from polyreme.report.timeline import time_shares
from polyreme.run_files.records import RunRecords
from polyreme.run_files.steady_time import Steps, without_clock_steps
from polyreme.run_files.timeline import Moment
from polyreme_api.job import TrainingJob
from polyreme_api.job.status import RestartRecord
from polyreme_operator.types.reasons import Cause, Scope

NO_FAILURES = frozenset({Cause.HOST_RESTARTED, Cause.STOPPED, Cause.RESIZE, Cause.PREEMPTED, Cause.SUSPEND})
"""Causes that end an attempt with nothing broken: what follows is no recovery."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Durations of a run up to one moment."""

    records: RunRecords
    """What the ranks left, with times on the clock that never steps."""
    attempts: Sequence[AttemptRow]
    shares: Sequence[TimeShare]
    """What the wall time was spent on; they add up to it."""
    restart_s: float | None
    """Longest time from a failure to the next trained step; None: nothing failed, or nothing was trained since."""
    now_s: float

    @property
    def wall_s(self) -> float:
        """Time from the first attempt to the end, or to now."""
        return sum(share.seconds for share in self.shares)


def run_times(job: TrainingJob, records: RunRecords, moments: Sequence[Moment], *, now: Moment) -> RunTimes:
    """Work out where the time of a run went.

    Args:
        job: The job with its newest status.
        records: What the ranks left.
        moments: What the serving process saw of the attempts, in order.
        now: The present, for a run that has not finished.
    """
    (*seen, present), steps = without_clock_steps([*moments, now], records.steps)
    records = dataclasses.replace(records, steps=steps)
    attempts = attempt_rows(job, steps, seen)
    shares = time_shares(attempts, committed=records.history, thrown_away=records.discarded, now_s=present.at_s)
    return RunTimes(
        records=records,
        attempts=attempts,
        shares=shares,
        restart_s=restart_s(seen, steps, causes=_causes(job)),
        now_s=present.at_s,
    )


def restart_s(moments: Sequence[Moment], steps: Steps, *, causes: Mapping[int, str]) -> float | None:
    """Longest time from a failure to the end of the next step that a later attempt trained [s].

    An attempt fails when a fault is injected; else, as far as anybody can tell, when it ended its last step, or when it
    began if it trained none.

    Args:
        moments: Attempts and faults.
        steps: Step records by attempt.
        causes: Why attempts ended, of those that did not end well.
    """
    failed_s = {moment.attempt: moment.at_s for moment in moments if moment.kind == "fault"}
    for moment in moments:
        if moment.kind == "attempt" and causes.get(moment.attempt, Cause.STOPPED) not in NO_FAILURES:
            trained = steps.get(moment.attempt)
            failed_s.setdefault(moment.attempt, trained[-1].ended_at_s if trained else moment.at_s)
    firsts = {attempt: records[0].ended_at_s for attempt, records in steps.items() if records}
    waits = [
        min(later) - at_s
        for attempt, at_s in failed_s.items()
        if (later := [first_s for other, first_s in firsts.items() if other > attempt and first_s > at_s])
    ]
    return max(waits, default=None)


def attempt_rows(job: TrainingJob, steps: Steps, moments: Sequence[Moment]) -> list[AttemptRow]:
    """Join the operator's record of each attempt with the moments that were seen of it."""
    causes = {record.attempt: record for record in job.status.restart_records}
    starts = {moment.attempt: moment for moment in moments if moment.kind == "attempt"}
    finished_s = _finished_s(moments)
    asked = {moment.attempt for moment in moments if moment.kind == "stopped"}
    rows = []
    for number, start in sorted(starts.items()):
        following = next((moment for other, moment in sorted(starts.items()) if other > number), None)
        cause: RestartRecord | None = causes.get(number)
        trained = steps.get(number, ())
        rows.append(
            AttemptRow(
                number=number,
                scope=start.text,
                started_s=start.at_s,
                first_step=trained[0].step if trained else None,
                last_step=trained[-1].step if trained else None,
                ended_s=following.at_s if following else finished_s,
                succeeded=cause is None and job.status.is_true("Succeeded") and number == max(starts),
                stopped=(number in asked and (cause is None or cause.cause == Cause.HOST_RESTARTED))
                or (cause is None and (following.text == Scope.RESUME if following else job.spec.suspend)),
                cause=cause.cause if cause else "",
                message=cause.message if cause else "",
            )
        )
    return rows


def _causes(job: TrainingJob) -> dict[int, str]:
    return {record.attempt: record.cause for record in job.status.restart_records}


def _finished_s(moments: Sequence[Moment]) -> float | None:
    """When the newest attempt ended the job; an earlier end that the run continued from is none."""
    newest = max((moment.attempt for moment in moments if moment.kind == "attempt"), default=0)
    return next((moment.at_s for moment in moments if moment.kind == "finished" and moment.attempt == newest), None)
