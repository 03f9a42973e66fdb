"""Accounting of a job's time: the one place that charges it, in device-milliseconds by what it was spent on and why.

Time is charged from where the last charge ended (``accounting.until``), so that spans neither overlap nor leave gaps,
whatever clocks do: the sums are the time x the devices exactly. An attempt is charged when it closes, and the certain
part of it every ``SETTLE_EVERY_S`` before that and when its overhead changes its kind. The time in the queue is charged
at its end, with the devices that the job asks for.

*Productive* is the time of retained steps: all of them if the attempt succeeded, those up to the newest durable
checkpoint if it failed, less the time in which they waited for data. Steps after that checkpoint will be recomputed;
they are charged to the cause that ended the attempt, as is the time of a hang. What remains is overhead: waiting for
pods, checks, the start; it is charged to the cause that began the attempt. Step times are the ranks' own (ByteRobust's
effective training time ratio, arXiv:2509.16293, counts the same way).
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.accounting import (
    DAYS_MAX,
    Accounting,
    DayTime,
    LostTime,
    SettledTime,
    Use,
    cells_of,
    is_queued,
    table_of,
)
from polyreme_api.job.status import LastCheckpoint
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.types.reasons import Cause, ConditionType, Reason, Scope
from polyreme_operator.types.timestamps import parse_time_or

MILLISECONDS = 1000
SETTLE_EVERY_S = 900.0
"""How often a running attempt is settled: 17 writes per second for 15,000 running jobs."""

Parts: TypeAlias = Counter[tuple[str, str]]
"""Milliseconds by what and why."""

_PRODUCTIVE = (Use.PRODUCTIVE.value, "")
_DATA_WAIT = (Use.DATA_WAIT.value, Cause.DATA_WAIT.value)
_CHECKPOINT = (Use.CHECKPOINT.value, Cause.CHECKPOINT.value)
_EVALUATING = (Use.EVALUATING.value, Cause.EVALUATION.value)


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
    parts, again_ms, idle_ms = _attempt_parts(
        status, record, all_kept=ended_by is None, idle_s=hung_s if ended_by else 0.0, use=overhead(status), now_s=now_s
    )
    if ended_by is not None:
        parts[Use.RECOMPUTED.value, ended_by.value] += again_ms
        parts[Use.HANG.value, ended_by.value] += idle_ms
    until = _latest(*_ends(status), rfc3339(now_s))
    update: dict[str, object] = {"accounting": _charged(status, parts, devices=_devices(status), until=until)}
    if record is not None:
        update["step"] = max(status.step, record.step)
    status = status.model_copy(update=update)
    return with_checkpoint(status, record, now_s=now_s)


def settle(
    status: TrainingJobStatus, record: ProgressRecord | None, *, now_s: float, use: Use, idle_s: float = 0.0
) -> TrainingJobStatus:
    """Charge the certain part of a running attempt's time, if it is due.

    That is its time without steps, and the time of steps up to its durable checkpoint. It is not known yet whether
    later steps are retained, and the time since the newest step may be a hang.

    Args:
        status: The job's status.
        record: The attempt's last report.
        now_s: The time.
        use: Kind of the overhead until now; a change of it is settled at once.
        idle_s: Time since the newest step.
    """
    due_s = settlement_due_s(status)
    if due_s is None or status.attempt is None or record is None or (now_s < due_s and use is overhead(status)):
        return status
    if use in {Use.WAITING_FOR_PODS, Use.PRE_CHECK} and not record.step_seconds:
        idle_s = 0.0  # the leader says the same for as long as it waits
    parts, _, _ = _attempt_parts(status, record, all_kept=False, idle_s=idle_s, use=use, now_s=now_s)
    began, devices = _began(status), _devices(status)
    settled = SettledTime(
        attempt=status.attempt.number,
        at=_latest(*_ends(status), rfc3339(now_s)),
        effective_milliseconds=parts[_PRODUCTIVE],
        data_wait_milliseconds=parts[_DATA_WAIT],
        cause=began,
        lost_milliseconds=sum(ms for (_, why), ms in parts.items() if why == began),
        cells=cells_of(_times(parts, devices)),
    )
    accounts = _charged(status, parts, devices=devices, until=status.accounting.until, settled=settled)
    return status.model_copy(update={"accounting": accounts})


def close_wait(
    status: TrainingJobStatus, spec: TrainingJobSpec | None, *, created_s: float, now_s: float
) -> TrainingJobStatus:
    """Charge the time for which a job has waited, in the queue or suspended, with the devices that it asks for."""
    accounts, until = status.accounting, rfc3339(now_s)
    since = accounts.until or (rfc3339(created_s) if status.first_admitted_at is None else until)
    waited_ms = max(0, _ms(until) - _ms(since))
    devices = 0 if spec is None else spec.workers.replicas * spec.workers.devices
    parts: Parts = Counter({(Use.QUEUED.value, _waits_for(status).value): waited_ms})
    idle = status.model_copy(update={"accounting": accounts.model_copy(update={"settled": None})})
    accounts = _charged(idle, parts, devices=devices, until=_latest(since, until))
    return status.model_copy(update={"accounting": accounts})


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


def overhead(status: TrainingJobStatus) -> Use:
    """Return what the time of an attempt is spent on when it is not in steps, by the conditions of its status."""
    ranks, checked = status.condition(ConditionType.RUNNING), status.condition(ConditionType.NODES_CHECKED)
    if ranks is not None and ranks.reason == Reason.STARTING and not status.is_true(ConditionType.PODS_READY):
        return Use.WAITING_FOR_PODS
    if checked is not None and checked.reason in {Reason.STARTING, Reason.CHECKING_NODES}:
        return Use.PRE_CHECK
    return Use.RESIZE if _began(status) == Cause.RESIZE else Use.STARTING


def _attempt_parts(
    status: TrainingJobStatus, record: ProgressRecord | None, *, all_kept: bool, idle_s: float, use: Use, now_s: float
) -> tuple[Parts, int, int]:
    """Split the time of the attempt until now; settled parts never shrink.

    ``idle_s`` is time without steps that is no overhead. Returned apart: the time of steps that may be lost, and of
    that idle time.
    """
    assert status.attempt is not None, "only an attempt takes time"
    now_ms = _ms(rfc3339(now_s))
    began_ms, *ends_ms = (_ms(end) or now_ms for end in _ends(status))
    wall_ms = max(now_ms, began_ms, *ends_ms) - began_ms
    kept_s, again_s = _split_steps(record, wall_ms / MILLISECONDS, all_kept=all_kept)
    waited_s = _waited(record, kept_s, again_s)
    parts = _settled_parts(status)
    left_ms = max(0, wall_ms - parts.total())

    def take(wanted_s: float, known_ms: int) -> int:
        nonlocal left_ms
        taken_ms = min(left_ms, max(0, _milliseconds(wanted_s) - known_ms))
        left_ms -= taken_ms
        return taken_ms

    parts[_PRODUCTIVE] += take(kept_s - waited_s, parts[_PRODUCTIVE])
    parts[_DATA_WAIT] += take(waited_s, parts[_DATA_WAIT])
    again_ms = take(again_s, 0)
    idle_ms = take(idle_s, 0)
    if record is not None:
        parts[_CHECKPOINT] += take(record.checkpoint_seconds, parts[_CHECKPOINT])
        parts[_EVALUATING] += take(record.evaluation_seconds, parts[_EVALUATING])
    parts[use.value, _began(status)] += left_ms
    return parts, again_ms, idle_ms


def _charged(
    status: TrainingJobStatus, parts: Parts, *, devices: int, until: str, settled: SettledTime | None = None
) -> Accounting:
    """Add parts to the sums, in place of what was settled of them."""
    accounts, known = status.accounting, _settled_parts(status)
    effective_ms = max(0, accounts.effective_milliseconds - known[_PRODUCTIVE])
    lost = Counter({entry.cause: entry.milliseconds for entry in accounts.lost})
    _add_lost(lost, known, -1)
    if accounts.cells:
        cells = table_of(accounts.cells)
        cells.subtract(_times(known, devices))
    else:
        cells = _accounts(effective_ms, lost).converted(devices=devices)
    cells.update(_times(parts, devices))
    _add_lost(lost, parts, 1)
    more = _times(parts, devices)
    more.subtract(_times(known, devices))
    return _accounts(effective_ms + parts[_PRODUCTIVE], lost).model_copy(
        update={
            "cells": cells_of(cells),
            "days": _days(accounts.days, more, until if settled is None else settled.at),
            "until": until,
            "settled": settled,
        }
    )


def _add_lost(lost: Counter[str], parts: Parts, sign: int) -> None:
    """Add the lost time of attempts; the queue holds no devices."""
    for (what, why), ms in parts.items():
        if why and what != Use.QUEUED:
            lost[why] = max(0, lost[why] + sign * ms)


def _accounts(effective_ms: int, lost: Counter[str]) -> Accounting:
    entries = [LostTime(cause=cause, milliseconds=time) for cause, time in sorted(lost.items()) if time]
    return Accounting(effective_milliseconds=effective_ms, lost=entries)


def _days(days: list[DayTime], more: Parts, at: str) -> list[DayTime]:
    """Add what was charged to its day; the oldest day takes in those before it."""
    productive, queued = more[_PRODUCTIVE], sum(time for pair, time in more.items() if is_queued(*pair))
    held = sum(time for (what, _), time in more.items() if what != Use.QUEUED)
    if not (held or queued):
        return days
    day = max([at[:10], *(entry.day for entry in days[-1:])])
    *earlier, last = days if days and days[-1].day == day else [*days, DayTime(day=day)]
    days = [*earlier, _plus(last, day, productive, held, queued)]
    if len(days) > DAYS_MAX:
        first, second, *later = days
        productive, held = first.productive_device_milliseconds, first.held_device_milliseconds
        days = [_plus(second, second.day, productive, held, first.queued_device_milliseconds), *later]
    return days


def _plus(entry: DayTime, day: str, productive: int, held: int, queued: int) -> DayTime:
    return DayTime(
        day=day,
        productive_device_milliseconds=entry.productive_device_milliseconds + productive,
        held_device_milliseconds=entry.held_device_milliseconds + held,
        queued_device_milliseconds=entry.queued_device_milliseconds + queued,
    )


def _settled(status: TrainingJobStatus) -> SettledTime | None:
    settled, attempt = status.accounting.settled, status.attempt
    return settled if settled is not None and attempt is not None and settled.attempt == attempt.number else None


def _settled_parts(status: TrainingJobStatus) -> Parts:
    """Return the milliseconds of the attempt that the sums hold already."""
    settled = _settled(status)
    if settled is None:
        return Counter()
    if settled.cells:
        devices = _devices(status)
        return Counter({pair: time // devices for pair, time in table_of(settled.cells).items()})
    parts: Parts = Counter()  # of an operator of 0.1.0
    parts[_PRODUCTIVE] = settled.effective_milliseconds
    parts[_DATA_WAIT] = settled.data_wait_milliseconds
    parts[Use.STARTING.value, settled.cause] = settled.lost_milliseconds
    return parts


def _devices(status: TrainingJobStatus) -> int:
    attempt = status.attempt
    return 0 if attempt is None else attempt.replicas * attempt.devices


def _times(parts: Parts, devices: int) -> Parts:
    return Counter({pair: ms * devices for pair, ms in parts.items()})


def _ends(status: TrainingJobStatus) -> list[str]:
    """Return when the uncharged time of an attempt begins, and when it was settled last, if it was."""
    attempt, settled = status.attempt, _settled(status)
    assert attempt is not None, "only an attempt takes time"
    begins = _latest(status.accounting.until, attempt.started_at)
    return [begins] if settled is None else [begins, settled.at]


def _latest(*times: str) -> str:
    return max(times, key=_ms)


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
    step_s = record.trained_seconds / trained if trained and record.trained_seconds else record.step_seconds
    kept_s = min(wall_s, kept * step_s)
    return kept_s, min(wall_s - kept_s, (trained - kept) * step_s)


def _waited(record: ProgressRecord | None, kept_s: float, again_s: float) -> float:
    """Return the retained steps' share of the time in which steps waited for data; at most the time of these steps."""
    if record is None or not kept_s:
        return 0.0
    return min(kept_s, record.data_wait_seconds * kept_s / (kept_s + again_s))


_BY_MOVES = frozenset({Scope.PROCESS.value, Scope.POD.value, Scope.GANG.value})


def _began(status: TrainingJobStatus) -> str:
    """Return the cause that began the attempt."""
    settled = _settled(status)
    return _began_by(status).value if settled is None else settled.cause


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


def suspended_by_user(status: TrainingJobStatus) -> bool:
    """Tell whether a job waits because its user suspended it; a pause because of its loss is no wish."""
    found = status.condition(ConditionType.SUSPENDED)
    return found is not None and found.status == "True" and found.reason != Reason.LOSS_SPIKES


def _waits_for(status: TrainingJobStatus) -> Cause:
    """Return why a job without an admission waits: its user, or what ended its last attempt."""
    attempt, last = status.attempt, status.restart_records[-1:]
    if suspended_by_user(status):
        return Cause.SUSPEND
    if attempt is not None and last and last[0].attempt == attempt.number:
        return Cause(last[0].cause)
    if status.is_true(ConditionType.PREEMPTED):
        return Cause.PREEMPTED
    return Cause.STARTING if status.set_aside is None else Cause.START_TIMED_OUT


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * MILLISECONDS))


def _ms(at: str) -> int:
    """Return a recorded time in milliseconds since the epoch; of the same text always the same."""
    return _milliseconds(parse_time_or(at, 0.0))
