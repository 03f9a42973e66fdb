"""Observer of the operator's work, for metrics; controller and writer call it, and no decision depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import Record
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView

_Arguments = ParamSpec("_Arguments")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CycleReport:
    """Figures of one scheduling cycle."""

    cycle_s: float
    """Duration of the decision, without its writes."""
    placement_s: tuple[float, ...] = ()
    """Duration of each placement search."""
    waiting: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Waiting jobs by queue and reason."""
    used: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Amount in use by queue and resource."""
    quota: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """Nominal quota by queue and resource."""
    objects: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Cached objects by kind."""
    quarantined: int = 0
    """Jobs in quarantine."""


class Observer:
    """Receives reports and ignores them; overridden methods must be fast and must not raise."""

    def on_status_written(self, job: JobView, after: TrainingJobStatus, *, now_s: float) -> None:
        """A status write was accepted; ``job`` is the state before it."""

    def on_job_observed(self, snapshot: JobSnapshot) -> None:
        """A job is reconciled; the snapshot includes the metrics of its newest step."""

    def on_cycle_finished(self, seen: CycleReport) -> None:
        """A scheduling cycle has finished."""

    def on_job_deleted(self, uid: str) -> None:
        """A job was deleted."""

    def on_event_dropped(self, reason: str) -> None:
        """An event was dropped by the rate limiter."""

    def on_job_failed(self, uid: str, error: Exception) -> None:
        """A decision about a job raised an error."""

    def on_object_unreadable(self, kind: str) -> None:
        """An object of this kind can't be read."""

    def on_record_refused(self, fault: str) -> None:
        """A progress record on a job's Lease does not count."""

    def on_node_fault(self, fault_class: str, action: str) -> None:
        """A fault of a node was acted on, or, with an action ``Observe...``, only counted."""

    def on_node_tainted(self, after_s: float) -> None:
        """A taint was stored, so long after the operator first saw the condition that asked for it."""

    def on_node_repair(self, action: str, result: str) -> None:
        """A hook that repairs a node was started, has succeeded or has failed."""

    def on_node_states(self, states: Mapping[str, int], out: Sequence[tuple[HealthNode, Record]]) -> None:
        """The state of nodes was decided; ``states`` counts the nodes of each, ``out`` are those out of service."""

    def on_incident_dropped(self) -> None:
        """Something that happened to a node could not be added to the history."""

    def on_incident_cost(self, fault_class: str, device_s: float) -> None:
        """It is known that an incident of this class cost a job so many device-seconds."""

    def on_alert(self, result: str) -> None:
        """An alert was delivered to the webhook, is sent again, or was dropped."""


def _to_each(report: Callable[Concatenate[Observer, _Arguments], None]) -> Callable[Concatenate[Any, _Arguments], None]:
    def pass_on(self: Observers, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        for observer in self.observers:
            getattr(observer, report.__name__)(*arguments, **named)

    return pass_on


class Observers(Observer):
    """Passes each report on to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    on_status_written = _to_each(Observer.on_status_written)
    on_job_observed = _to_each(Observer.on_job_observed)
    on_cycle_finished = _to_each(Observer.on_cycle_finished)
    on_job_deleted = _to_each(Observer.on_job_deleted)
    on_event_dropped = _to_each(Observer.on_event_dropped)
    on_job_failed = _to_each(Observer.on_job_failed)
    on_object_unreadable = _to_each(Observer.on_object_unreadable)
    on_record_refused = _to_each(Observer.on_record_refused)
    on_node_fault = _to_each(Observer.on_node_fault)
    on_node_tainted = _to_each(Observer.on_node_tainted)
    on_node_repair = _to_each(Observer.on_node_repair)
    on_node_states = _to_each(Observer.on_node_states)
    on_incident_dropped = _to_each(Observer.on_incident_dropped)
    on_incident_cost = _to_each(Observer.on_incident_cost)
    on_alert = _to_each(Observer.on_alert)
