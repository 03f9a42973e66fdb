"""Accounting of a job's time: effective time of retained steps, and lost time by cause.

An attempt's time, from its record to its end, is split when it closes; the certain part of it is counted every
``SETTLE_EVERY_S`` before that. *Effective* is the time of retained steps: all of them if the attempt succeeded, those
up to the newest durable checkpoint if it failed, less the time in which they waited for data, which is charged to the
cause ``DataWait``. Steps after that checkpoint will be repeated; they are charged to the
cause that ended the attempt, as is the time of a hang. The remaining time, which is startup and everything that is not
a step, is charged to the cause that began the attempt. Step times are the ranks' own (ByteRobust's effective training
time ratio, arXiv:2509.16293, counts the same way).
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import Accounting, LastCheckpoint, LostTime, SettledTime
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.types.reasons import Cause, ConditionType, Scope
from polyreme_operator.types.timestamps import parse_time_or

MILLISECONDS = 1000
SETTLE_EVERY_S = 900.0
"""How often a running attempt is settled: 17 writes per second for 15,000 running jobs."""


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
        record: The attempt's last report.
        ended_by: Why it ended; None if it succeeded.
        now_s: The time.
        hung_s: Time without a step before the end, which is charged to the cause that ended the attempt.
    """
    if status.attempt is None:
        return status
    time = _attempt_time(status, record, all_kept=ended_by is None, idle_s=hung_s, now_s=now_s)
    effective_ms, lost = _without_settled(status)
    if ended_by is not None:
        lost[ended_by.value] += time.again_ms
    lost[time.cause] += time.lost_ms
    lost[Cause.DATA_WAIT.value] += time.waited_ms
    update: dict[str, object] = {"accounting": _accounting(effective_ms + time.kept_ms, lost)}
    if record is not None:
        update["step"] = max(status.step, record.step)
    status = status.model_copy(update=update)
    return with_checkpoint(status, record, now_s=now_s)


def settle(
    status: TrainingJobStatus, record: ProgressRecord | None, *, now_s: float, idle_s: float = 0.0
) -> TrainingJobStatus:
    """Charge the certain part of a running attempt's time, if it is due.

    That is its time without steps, and the time of steps up to its durable checkpoint. It is not known yet whether
    later steps are retained, and the time since the newest step may be a hang.

    Args:
        status: The job's status.
        record: The attempt's last report.
        now_s: The time.
        idle_s: Time since the newest step.
    """
    due_s = settlement_due_s(status)
    if due_s is None or now_s < due_s or status.attempt is None or record is None:
        return status
    time = _attempt_time(status, record, all_kept=False, idle_s=idle_s, now_s=now_s)
    effective_ms, lost = _without_settled(status)
    lost[time.cause] += time.lost_ms
    lost[Cause.DATA_WAIT.value] += time.waited_ms
    settled = SettledTime(
        attempt=status.attempt.number,
        at=rfc3339(now_s),
        effective_milliseconds=time.kept_ms,
        data_wait_milliseconds=time.waited_ms,
        cause=time.cause,
        lost_milliseconds=time.lost_ms,
    )
    return status.model_copy(update={"accounting": _accounting(effective_ms + time.kept_ms, lost, settled)})


def settlement_due_s(status: TrainingJobStatus) -> float | None:
    """Return when the running attempt is settled next; None without one."""
    if status.attempt is None:
        return None
    settled = _settled(status)
    last_s = parse_time_or(status.attempt.started_at if settled is None else settled.at, None)
    return None if last_s is None else last_s + SETTLE_EVERY_S


def with_checkpoint(status: TrainingJobStatus, record: ProgressRecord | None, *, now_s: float) -> TrainingJobStatus:
    """Store the newest durable checkpoint that a record names."""
    if record is None or record.checkpoint is None:
        return status
    known = status.last_checkpoint
    newest = record.checkpoint
    if known is not None and (known.attempt, known.step) >= (newest.attempt, newest.step):
        return status
    taken = LastCheckpoint(attempt=newest.attempt, step=newest.step, at=rfc3339(now_s))
    return status.model_copy(update={"last_checkpoint": taken})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptTime:
    """Split of an attempt's time; the parts add up to the whole."""

    cause: str
    """The cause that began the attempt."""
    kept_ms: int
    waited_ms: int
    """Time in which retained steps waited for data."""
    again_ms: int
    """Time of steps that will be repeated, and idle time at the end."""
    lost_ms: int
    """Time charged to ``cause``."""


def _attempt_time(
    status: TrainingJobStatus, record: ProgressRecord | None, *, all_kept: bool, idle_s: float, now_s: float
) -> _AttemptTime:
    """Split the time of the attempt until now; settled parts never shrink.

    ``idle_s`` is time without steps that is not charged to the cause that began the attempt.
    """
    assert status.attempt is not None, "only an attempt takes time"
    wall_s = max(0.0, now_s - parse_time_or(status.attempt.started_at, now_s))
    kept_s, again_s = _split_steps(record, wall_s, all_kept=all_kept)
    waited_s = _waited(record, kept_s, again_s)
    settled, wall_ms = _settled(status), _milliseconds(wall_s)
    if settled is None:
        cause, kept_least_ms, waited_least_ms, lost_least_ms = _began_by(status).value, 0, 0, 0
    else:
        cause, kept_least_ms = settled.cause, settled.effective_milliseconds
        waited_least_ms, lost_least_ms = settled.data_wait_milliseconds, settled.lost_milliseconds
    kept_ms = min(wall_ms, max(kept_least_ms, _milliseconds(kept_s - waited_s)))
    waited_ms = min(max(waited_least_ms, _milliseconds(waited_s)), wall_ms - kept_ms)
    again_ms = min(_milliseconds(again_s + max(0.0, idle_s)), max(0, wall_ms - kept_ms - waited_ms - lost_least_ms))
    return _AttemptTime(
        cause=cause,
        kept_ms=kept_ms,
        waited_ms=waited_ms,
        again_ms=again_ms,
        lost_ms=wall_ms - kept_ms - waited_ms - again_ms,
    )


def _settled(status: TrainingJobStatus) -> SettledTime | None:
    settled, attempt = status.accounting.settled, status.attempt
    return settled if settled is not None and attempt is not None and settled.attempt == attempt.number else None


def _without_settled(status: TrainingJobStatus) -> tuple[int, Counter[str]]:
    """Return effective time and lost time by cause of earlier attempts."""
    lost = Counter({entry.cause: entry.milliseconds for entry in status.accounting.lost})
    effective_ms, settled = status.accounting.effective_milliseconds, _settled(status)
    if settled is not None:
        effective_ms = max(0, effective_ms - settled.effective_milliseconds)
        lost[settled.cause] = max(0, lost[settled.cause] - settled.lost_milliseconds)
        waited = Cause.DATA_WAIT.value
        lost[waited] = max(0, lost[waited] - settled.data_wait_milliseconds)
    return effective_ms, lost


def _accounting(effective_ms: int, lost: Counter[str], settled: SettledTime | None = None) -> Accounting:
    entries = [LostTime(cause=cause, milliseconds=time) for cause, time in sorted(lost.items()) if time]
    return Accounting(effective_milliseconds=effective_ms, lost=entries, settled=settled)


def _split_steps(record: ProgressRecord | None, wall_s: float, *, all_kept: bool) -> tuple[float, float]:
    """Return seconds of retained and of repeated steps; together at most the attempt's time."""
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


def _waited(record: ProgressRecord | None, kept_s: float, again_s: float) -> float:
    """Return the retained steps' share of the time in which steps waited for data; at most the time of these steps."""
    if record is None or not kept_s:
        return 0.0
    return min(kept_s, record.data_wait_seconds * kept_s / (kept_s + again_s))


_BY_MOVES = frozenset({Scope.PROCESS.value, Scope.POD.value, Scope.GANG.value})


def _began_by(status: TrainingJobStatus) -> Cause:
    attempt = status.attempt
    if attempt is not None and status.restart_records and status.restart_records[-1].attempt == attempt.number - 1:
        return Cause(status.restart_records[-1].cause)
    if attempt is not None and attempt.scope == Scope.RESIZE:
        return Cause.RESIZE
    if attempt is not None and attempt.scope in _BY_MOVES:
        # No failure called for it.
        return Cause.NODE_FAULT
    if attempt is not None and attempt.scope == Scope.RESUME and status.condition(ConditionType.PREEMPTED) is not None:
        return Cause.PREEMPTED
    return Cause.STARTING


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * MILLISECONDS))
