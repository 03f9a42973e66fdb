"""Where a job's time went: trained steps that stay history, and time lost by cause.

An attempt's time, from its record to its end, is split when it closes. *Effective* is the time of the steps that
stay: up to the newest durable checkpoint when the attempt failed, all of them when it ended well. Steps behind that
checkpoint will be trained again: they are lost to what ended the attempt, as is the time of a hang. The rest, from
process start to the first step and all that is no step, is lost to what began the attempt. Step times are the ranks'
own (ByteRobust's effective training time ratio, arXiv:2509.16293, counts the same way).
"""

from __future__ import annotations

from collections import Counter

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import Accounting, LastCheckpoint, LostTime
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.types.reasons import Cause, ConditionType, Scope
from polyreme_operator.types.timestamps import parse_time_or

MILLISECONDS = 1000


def close_attempt(
    status: TrainingJobStatus,
    record: ProgressRecord | None,
    *,
    ended_by: Cause | None,
    now_s: float,
    hung_s: float = 0.0,
) -> TrainingJobStatus:
    """Charge the current attempt's time.

    Args:
        status: The job's status.
        record: What the attempt last reported.
        ended_by: Why it ended; None: it ended well.
        now_s: The time.
        hung_s: Time without a step before the end, which is lost to what ended the attempt.
    """
    if status.attempt is None:
        return status
    began_s = parse_time_or(status.attempt.started_at, now_s)
    wall_s = max(0.0, now_s - began_s)
    kept_s, again_s = _split_steps(record, wall_s, all_kept=ended_by is None)
    hung_s = min(max(0.0, hung_s), wall_s - kept_s - again_s)
    lost = Counter({entry.cause: entry.milliseconds for entry in status.accounting.lost})
    if ended_by is not None:
        lost[ended_by.value] += _milliseconds(again_s + hung_s)
    lost[_began_by(status).value] += _milliseconds(wall_s - kept_s - again_s - hung_s)
    accounting = Accounting(
        effective_milliseconds=status.accounting.effective_milliseconds + _milliseconds(kept_s),
        lost=[LostTime(cause=cause, milliseconds=time) for cause, time in sorted(lost.items()) if time],
    )
    update: dict[str, object] = {"accounting": accounting}
    if record is not None:
        update["step"] = max(status.step, record.step)
    status = status.model_copy(update=update)
    return with_checkpoint(status, record, now_s=now_s)


def with_checkpoint(status: TrainingJobStatus, record: ProgressRecord | None, *, now_s: float) -> TrainingJobStatus:
    """Take over the newest durable checkpoint that a record names."""
    if record is None or record.checkpoint is None:
        return status
    known = status.last_checkpoint
    newest = record.checkpoint
    if known is not None and (known.attempt, known.step) >= (newest.attempt, newest.step):
        return status
    taken = LastCheckpoint(attempt=newest.attempt, step=newest.step, at=rfc3339(now_s))
    return status.model_copy(update={"last_checkpoint": taken})


def goodput(status: TrainingJobStatus) -> float:
    """Share of the time of closed attempts in which steps were trained that are history."""
    lost = sum(entry.milliseconds for entry in status.accounting.lost)
    whole = status.accounting.effective_milliseconds + lost
    return status.accounting.effective_milliseconds / whole if whole else 0.0


def _split_steps(record: ProgressRecord | None, wall_s: float, *, all_kept: bool) -> tuple[float, float]:
    """Seconds of steps that stay, and of steps that will be trained again; together at most the attempt's time."""
    if record is None or not record.step_seconds:
        return 0.0, 0.0
    began = record.resumed_from_step or 0
    trained = max(0, record.step - began)
    kept = trained
    if not all_kept:
        durable = (
            record.checkpoint.step
            if record.checkpoint is not None and record.checkpoint.attempt == record.attempt
            else began
        )
        kept = min(trained, max(0, durable - began))
    kept_s = min(wall_s, kept * record.step_seconds)
    return kept_s, min(wall_s - kept_s, (trained - kept) * record.step_seconds)


def _began_by(status: TrainingJobStatus) -> Cause:
    attempt = status.attempt
    if attempt is not None and status.restart_records and status.restart_records[-1].attempt == attempt.number - 1:
        return Cause(status.restart_records[-1].cause)
    if attempt is not None and attempt.scope == Scope.RESIZE:
        return Cause.RESIZE
    if attempt is not None and attempt.scope == Scope.RESUME and status.condition(ConditionType.PREEMPTED) is not None:
        return Cause.PREEMPTED
    return Cause.STARTING


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * MILLISECONDS))
