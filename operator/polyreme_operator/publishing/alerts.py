"""Alerts for people: a job failed, a job paused, ranks hung, a node left service; and the queue that delivers them.

An alert is a pure function of what the cluster stores, and its id too. So an operator that dies before it has delivered
one finds it again, and a receiver that got it twice sees the same id. Nothing here decides about jobs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from polyreme_api.clock import Clock
from polyreme_api.job import TrainingJobStatus
from polyreme_api.times import rfc3339
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import Record
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.reasons import Cause, ConditionType, Reason
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

QUEUE_MAX = 1_000
"""Alerts that wait for their delivery; of more, the newest are dropped and counted, until they are seen again."""
KNOWN_MAX = 10_000
"""Alerts that are remembered, so that none is queued twice."""
FRESH_S = 3_600.0
"""Age beyond which an alert is not sent: a new leader finds those of the last hour again."""
TRIES_MAX = 300
"""Tries of one alert, about a day if no other waits; then it is dropped and counted."""
BACKOFF_S = 1.0
BACKOFF_MAX_S = 300.0


class AlertKind(StrEnum):
    """What people are alerted to; the alert rules of the chart have the same names, after ``Polyreme``."""

    JOB_FAILED = "JobFailed"
    JOB_PAUSED_BY_LOSS = "JobPausedByLoss"
    """The loss spiked again after the most rollbacks."""
    JOB_HUNG = "JobHung"
    NODE_OUT = "NodeOut"
    """A node left service: by its policy, or by a person."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert."""

    kind: AlertKind
    subject_kind: str
    namespace: str = ""
    name: str
    uid: str
    occurrence: str
    """What tells it from others of the same kind and subject: an attempt, a time."""
    at_s: float
    reason: str
    message: str

    @property
    def id(self) -> str:
        """Id of the event: the same however often, and by whichever operator, it is sent."""
        return hashlib.sha256("\0".join((self.uid, self.kind, self.occurrence)).encode()).hexdigest()[:32]

    def payload(self, runbook_url: str) -> dict[str, Any]:
        """Return what is sent."""
        subject = {"kind": self.subject_kind, "namespace": self.namespace, "name": self.name, "uid": self.uid}
        return {
            "version": 1,
            "id": self.id,
            "kind": self.kind.value,
            "at": rfc3339(self.at_s),
            "subject": {key: value for key, value in subject.items() if value},
            "reason": self.reason,
            "message": self.message,
            "runbook": f"{runbook_url}#polyreme{self.kind.lower()}",
        }


def alerts_of_job(job: JobView, status: TrainingJobStatus) -> Iterator[Alert]:
    """Yield what people should know of a job."""
    for kind, condition_type, reason in _CONDITIONS:
        found = status.condition(condition_type)
        if found is None or (found.status != "True" if reason is None else found.reason != reason):
            continue
        attempt, at = 0 if status.attempt is None else status.attempt.number, found.last_transition_time
        occurrence = f"{attempt}" if kind is AlertKind.JOB_HUNG else at
        yield _of_job(job, kind, occurrence=occurrence, at=at, reason=found.reason, message=found.message)
    for record in status.restart_records:
        if record.cause == Cause.HUNG:
            words = {"occurrence": f"{record.attempt}", "reason": record.cause, "message": record.message}
            yield _of_job(job, AlertKind.JOB_HUNG, at=record.at, **words)


_CONDITIONS: tuple[tuple[AlertKind, ConditionType, Reason | None], ...] = (
    (AlertKind.JOB_FAILED, ConditionType.FAILED, None),
    (AlertKind.JOB_PAUSED_BY_LOSS, ConditionType.SUSPENDED, Reason.LOSS_SPIKES),
    (AlertKind.JOB_HUNG, ConditionType.RUNNING, Reason.STALLED),
)
"""Conditions that alert: when they have this reason; without one, when they hold."""


def _of_job(job: JobView, kind: AlertKind, *, occurrence: str, at: str, reason: str, message: str) -> Alert:
    return Alert(
        kind=kind,
        subject_kind="TrainingJob",
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        occurrence=occurrence,
        at_s=parse_time_or(at, 0.0),
        reason=reason,
        message=message,
    )


def alert_of_node(node: HealthNode, record: Record) -> Alert:
    """Return the alert of a node that is out of service; until it returns it stays the same."""
    cause = ": ".join(filter(None, (record.reason, record.evidence)))
    return Alert(
        kind=AlertKind.NODE_OUT,
        subject_kind="Node",
        name=node.name,
        uid=node.uid or node.name,
        occurrence=f"{max((0.0 if record.released is None else record.released.at_s, *record.repairs_s)):.3f}",
        at_s=record.since_s,
        reason=record.fault_class or record.reason or "Quarantined",
        message=f"{record.state.value} by {record.owner or 'the operator'}{f': {cause}' if cause else ''}",
    )


class AlertQueue(Observer):
    """Alerts that wait for their delivery; each is delivered at least once, and after the others if it is refused.

    Args:
        clock: The time.
        deliver: Sends one alert; False: it was not accepted, and is sent again later.
        counted: Called with ``Delivered``, ``Retried`` or ``Dropped``.
    """

    def __init__(
        self, clock: Clock, deliver: Callable[[Alert], Awaitable[bool]], counted: Callable[[str], None]
    ) -> None:
        self._clock, self._deliver, self._counted = clock, deliver, counted
        self.waiting: deque[Alert] = deque()
        self._tries: Counter[str] = Counter()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._wake = asyncio.Event()

    def on_status_written(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """Queue what a status that was written says."""
        del now_s
        self._look(alerts_of_job(job, after))

    def on_job_observed(self, snapshot: JobSnapshot) -> None:
        """Queue what a job that is reconciled says: also what an earlier leader has not delivered."""
        self._look(alerts_of_job(snapshot.job, snapshot.job.status))

    def on_node_states(self, states: Mapping[str, int], out: Sequence[tuple[HealthNode, Record]]) -> None:
        """Queue that nodes are out of service."""
        del states
        self._look(alert_of_node(*each) for each in out)

    async def run(self) -> None:
        """Deliver until cancelled."""
        refused = 0
        while True:
            while self.waiting:
                refused = 0 if await self._send(self.waiting[0]) else refused + 1
                if refused:
                    await self._clock.sleep(min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(refused - 1, 30)))
            self._wake.clear()
            await self._wake.wait()

    async def _send(self, alert: Alert) -> bool:
        """Send the first alert that waits; tell whether it was delivered."""
        delivered = await self._deliver(alert)
        self._counted("Delivered" if delivered else "Retried")
        self._tries[alert.id] += 1
        if not delivered and self._tries[alert.id] < TRIES_MAX:
            self.waiting.rotate(-1)
            return False
        if not delivered:
            self._counted("Dropped")
        self.waiting.popleft()
        del self._tries[alert.id]
        return delivered

    def _look(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            if self._clock.now_s() - alert.at_s > FRESH_S or alert.id in self._known:
                continue
            if len(self.waiting) >= QUEUE_MAX:
                self._counted("Dropped")
                continue
            self._known[alert.id] = None
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            self.waiting.append(alert)
            self._wake.set()
