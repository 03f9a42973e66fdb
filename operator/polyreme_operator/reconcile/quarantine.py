"""Quarantine of one job that can't be read, or about which a decision raised an error.

Its pods keep running and its devices stay charged; it is neither admitted nor moved, resized or preempted. The
condition ``Degraded`` reports why. Other jobs are not affected.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.reconcile.events import events_of
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.types.actions import Decision, WriteStatus
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import JobView

MESSAGE_CHARACTERS_MAX = 512


class JobFaultError(Exception):
    """An error in a decision about the whole cluster that was caused by the data of one job.

    Args:
        uid: UID of the job.
        error: The error.
    """

    def __init__(self, uid: str, error: Exception) -> None:
        super().__init__(f"a decision about job {uid} raised an error")
        self.uid, self.error = uid, error


@contextlib.contextmanager
def blaming(uid: str) -> Iterator[None]:
    """Attribute errors in this context to a job, unless they are attributed to one already.

    Raises:
        JobFaultError: Instead of any other error.
    """
    try:
        yield
    except JobFaultError:
        raise
    except Exception as error:
        raise JobFaultError(uid, error) from error


def fault_message(error: BaseException) -> str:
    """Return a bounded one-line description of an error."""
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS_MAX]


def with_degraded(job: JobView, decision: Decision, now_s: float) -> Decision:
    """Add the condition ``Degraded`` to a decision or remove it; finished jobs are left unchanged."""
    writes = [action for action in decision.actions if isinstance(action, WriteStatus)]
    status = writes[0].after if writes else job.status
    after = status if status.finished else _degraded(job, status, now_s)
    if after is status:
        return decision
    if writes:
        write = dataclasses.replace(writes[0], after=after, informational=False)
    else:
        write = WriteStatus(
            ref=job.ref, uid=job.uid, resource_version=job.resource_version, before=job.status, after=after
        )
    others = [action for action in decision.actions if not isinstance(action, WriteStatus)]
    events = [event for event in events_of(write) if event not in others]
    return dataclasses.replace(decision, actions=(write, *others, *events))


def _degraded(job: JobView, status: TrainingJobStatus, now_s: float) -> TrainingJobStatus:
    after = StatusBuilder(job, now_s, status)
    if not job.quarantined:
        return after.drop(ConditionType.DEGRADED).build()
    reason = Reason.UNREADABLE if job.unreadable else job.fault_reason
    message = f"the operator makes no decision about this job: {job.quarantined}"[:MESSAGE_CHARACTERS_MAX]
    return after.set(ConditionType.DEGRADED, True, reason, message).build()
