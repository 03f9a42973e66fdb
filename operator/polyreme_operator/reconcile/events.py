"""Events of a status write, with stable reasons, derived from the difference that it makes.

Every write of the same difference yields the same events, whatever decided it. The status is the record: an event may
be lost with the process that wrote the status.
"""

from __future__ import annotations

from polyreme_api import labels
from polyreme_api.job import TrainingJobStatus
from polyreme_operator.types.actions import EmitEvent, WriteStatus
from polyreme_operator.types.changes import Changes, Unreadable
from polyreme_operator.types.lease_record import RecordFault, RefusedRecord
from polyreme_operator.types.reasons import Cause, ConditionType, Reason, Scope

RESTARTED = "Restarted"
RESIZE_REFUSED = "ResizeRefused"
RECORD_REFUSED = "RecordRefused"

_QUEUED = frozenset({Reason.EVICTED, Reason.CREATE_REFUSED, Reason.SET_ASIDE, Reason.QUEUE_REFUSED})
_ON_CHANGE: tuple[tuple[ConditionType, frozenset[str], bool], ...] = (
    (
        ConditionType.PREEMPTED,
        frozenset({Reason.PREEMPTING, Reason.PREEMPTED, Reason.RECLAIMED, Reason.QUEUE_STOPPED}),
        True,
    ),
    (ConditionType.QUEUED, _QUEUED, True),
    (ConditionType.PODS_READY, frozenset({Reason.CREATE_REFUSED}), True),
    (ConditionType.DATA_READY, frozenset({Reason.DATA_REFUSED, Reason.PROCESSING_FAILED, Reason.DATA_MISSING}), True),
    (ConditionType.DATA_READY, frozenset({Reason.DATA_READABLE, Reason.DATA_PROCESSED}), False),
    (ConditionType.SUSPENDED, frozenset({Reason.SUSPENDING, Reason.SUSPENDED, Reason.RESUMED}), False),
    (ConditionType.SUSPENDED, frozenset({Reason.LOSS_SPIKES}), True),
    (ConditionType.NODES_CHECKED, frozenset({Reason.CHECKS_FAILED}), True),
    (ConditionType.RUNNING, frozenset({Reason.STALLED}), True),
    (ConditionType.STRAGGLERS_FOUND, frozenset({Reason.SLOW_RANK, Reason.SLOW_EXCHANGES}), True),
    (ConditionType.HANG_DETECTION_OFF, frozenset({Reason.RANKS_UNSEEN}), True),
    (ConditionType.RESIZE_REFUSED, frozenset({Reason.NO_FIT}), True),
    (ConditionType.TEMPLATE_FIELDS_UNKNOWN, frozenset({Reason.UNKNOWN_FIELDS}), True),
    (ConditionType.DEGRADED, frozenset({Reason.INTERNAL_ERROR, Reason.STATUS_REFUSED, Reason.UNREADABLE}), True),
    (ConditionType.SUCCEEDED, frozenset({Reason.COMPLETED, Reason.STOPPED_EARLY}), False),
)
"""Conditions whose change to one of these reasons is an event, and whether it is a warning."""


def events_of(write: WriteStatus) -> tuple[EmitEvent, ...]:
    """Return the events to emit after a write."""
    before, after = write.before, write.after
    events = [*_attempt_begun(before, after)]
    for kind, reasons, warning in _ON_CHANGE:
        found = after.condition(kind)
        if found is None or found.reason not in reasons or found.reason == _reason(before, kind):
            continue
        if kind is ConditionType.SUSPENDED and found.reason == Reason.SUSPENDED and found.status != "True":
            continue
        reason = RESIZE_REFUSED if kind is ConditionType.RESIZE_REFUSED else found.reason
        events.append((reason, found.message, warning))
    failed = after.condition(ConditionType.FAILED)
    if failed is not None and failed.status == "True" and not before.is_true(ConditionType.FAILED):
        events.append((failed.reason, failed.message, True))
    number = 0 if after.attempt is None else after.attempt.number
    by_reason: dict[str, tuple[str, bool]] = {}
    for reason, message, warning in events:
        # Several conditions may change to the same reason: the first one is enough.
        by_reason.setdefault(str(reason), (message, warning))
    return tuple(
        EmitEvent(
            ref=write.ref,
            uid=write.uid,
            reason=reason,
            message=message,
            warning=warning,
            key=f"{number}-{reason}".lower(),
        )
        for reason, (message, warning) in by_reason.items()
    )


_REFUSED = {
    RecordFault.UNSIGNED: "it has no signature; another account wrote it, or the image has a launcher of 0.1.0",
    RecordFault.FORGED: "the job's key did not sign it; another account wrote it",
    RecordFault.REPLAYED: "the job's leader has signed a newer one; another account wrote an older one again",
}


def warnings_of(changes: Changes) -> tuple[EmitEvent, ...]:
    """Return the events of what is ignored: of objects that can't be read, and of records that don't count."""
    # A job reports in its status that it can't be read.
    unreadable = (_unreadable(left_out) for left_out in changes.unreadable if left_out.ref.kind != labels.KIND_JOB)
    return (*unreadable, *(_refused(record) for record in changes.refused if record.first))


def _unreadable(left_out: Unreadable) -> EmitEvent:
    reason = Reason.UNREADABLE.value
    words = f"the operator ignores this object, because it can't be read: {left_out.why}"
    return EmitEvent(ref=left_out.ref, uid=left_out.uid, reason=reason, message=words, warning=True, key=reason.lower())


def _refused(record: RefusedRecord) -> EmitEvent:
    words = f"a progress record on the job's Lease is ignored: {_REFUSED[record.fault]}"
    key = f"{RECORD_REFUSED}-{record.fault}".lower()
    return EmitEvent(ref=record.ref, uid=record.uid, reason=RECORD_REFUSED, message=words, warning=True, key=key)


def _attempt_begun(before: TrainingJobStatus, after: TrainingJobStatus) -> list[tuple[str, str, bool]]:
    old = 0 if before.attempt is None else before.attempt.number
    if after.attempt is None or after.attempt.number <= old:
        return []
    admitted = after.condition(ConditionType.ADMITTED)
    words = "" if admitted is None else admitted.message
    scope = after.attempt.scope
    if scope in {Scope.START, Scope.RESUME}:
        return [(Reason.ADMITTED, words, False)]
    if scope == Scope.RESIZE:
        reason = Reason.RESIZED if admitted is None or admitted.reason == Reason.ADMITTED else admitted.reason
        return [(reason, words, False)]
    restarting = after.condition(ConditionType.RESTARTING)
    why = "" if restarting is None else restarting.message
    cause = "" if restarting is None else restarting.reason
    reason = cause if cause in {Cause.UNSCHEDULABLE, Cause.EVICTED} else RESTARTED
    return [(reason, f"{scope}: {why}", True)]


def _reason(status: TrainingJobStatus, kind: ConditionType) -> str:
    found = status.condition(kind)
    return "" if found is None else found.reason
