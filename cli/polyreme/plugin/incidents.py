"""NodeIncidents as `kubectl polyreme incidents` lists them and `kubectl polyreme incident` tells one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from polyreme.plugin.reading import list_all
from polyreme.views.formatting import duration
from polyreme.views.output import nearest
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.incident import IncidentJob
from polyreme_api.labels import KIND_INCIDENT
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ClusterPort, ObjectRef
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_operator.health.incidents import Incident, escaped, parse_incident, time_of

HEADINGS = ("NAME", "NODE", "CLASS", "REASON", "STATE", "SINCE", "LASTED", "DEVICE-HOURS")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
SINCE_MAX_S = 3_650 * 86_400.0
_OUTCOMES = {
    "Finished": "then it ended",
    "Suspended": "then it was suspended",
    "Preempted": "then it was preempted",
    "Deleted": "then it was deleted",
    "GivenUp": "it had not trained again after a week",
    "NeverTrained": "it had not trained there yet",
}
_ENDED = {
    "Healthy": "The node was healthy again",
    "Released": "A person released the node",
    "Recurred": "A fault came back during probation, and another incident began",
    "Replaced": "The record of the node was replaced, and another incident began",
    "NodeDeleted": "The Node object was deleted",
}


def seconds_of(text: str) -> float:
    """Read a length of time: ``90s``, ``30m``, ``24h`` or ``7d``.

    Raises:
        InvalidConfigError: If it is none, or longer than ten years.
    """
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    seconds = 0.0 if found is None else int(found[1]) * _UNITS_S[found[2]]
    if found is None or seconds > SINCE_MAX_S:
        raise InvalidConfigError(
            f"--since is refused: {text[:40]!r}, expected a number and s, m, h or d, such as 24h, at most 3650d",
            field="--since",
        )
    return seconds


async def read_incidents(cluster: ClusterPort) -> list[Incident]:
    """Read every incident, in the order of time; what can't be read is left out.

    Raises:
        NotFoundError: If the cluster does not know the kind.
    """
    found = (parse_incident(item) for item in await list_all(cluster, KIND_INCIDENT))
    return sorted((each for each in found if each is not None), key=lambda each: (each.since_s, each.name))


async def read_incident(cluster: ClusterPort, name: str) -> Incident:
    """Read one incident.

    Raises:
        NotFoundError: Naming those that exist.
    """
    try:
        found = parse_incident(await cluster.get(ObjectRef(kind=KIND_INCIDENT, name=name)))
    except PortNotFoundError as error:
        known = [each.name for each in await read_incidents(cluster)]
        raise NotFoundError(f"no incident {name!r}: {nearest(name, known)}", field="NAME") from error
    if found is None:
        raise NotFoundError(f"incident {name!r} was not written by the operator and can't be read", field="NAME")
    return found


def chosen(incidents: Iterable[Incident], *, node: str | None, since_s: float | None, now_s: float) -> list[Incident]:
    """Return the incidents of a node or machine that were open within the last so many seconds."""
    from_s = None if since_s is None else now_s - since_s
    return [
        each
        for each in incidents
        if (node is None or node in {each.spec.node, each.spec.hardware})
        and (from_s is None or each.is_open or time_of(each.status.ended_at) >= from_s)
    ]


def row_of(incident: Incident, now_s: float) -> tuple[str, ...]:
    """Return the cells of an incident's line."""
    spec, status = incident.spec, incident.status
    cells = (
        incident.name,
        spec.node,
        spec.fault_class,
        spec.reason,
        status.state or "open",
        _time(incident.since_s),
        duration(_end_s(incident, now_s) - incident.since_s),
        status.device_hours or "0.00",
    )
    return tuple(escaped(cell) for cell in cells)


def data_of(incident: Incident) -> dict[str, Any]:
    """Return an incident for programs."""
    spec, status = incident.spec.model_dump(by_alias=True), incident.status.model_dump(by_alias=True)
    return {"name": incident.name, **spec, **status}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One incident as sentences and tables."""

    head: tuple[str, ...]
    steps: tuple[tuple[str, str, str], ...]
    jobs: tuple[str, ...]
    end: str


def story_of(incident: Incident, now_s: float) -> Story:
    """Tell one incident."""
    spec, status = incident.spec, incident.status
    lasted = duration(_end_s(incident, now_s) - incident.since_s)
    until = f"the incident lasted {lasted}, until {_time(time_of(status.ended_at))}"
    if not status.ended_at:
        until = f"the incident has lasted {lasted} and is open"
    by = f"{spec.owner or 'unknown'}" + (f" (rule: {spec.rule})" if spec.rule else "")
    head = [
        f"Node {spec.node} left service at {_time(incident.since_s)}; {until}.",
        f"Cause: {spec.fault_class or 'unknown'}, {spec.reason or 'no code'}"
        + (f", on device {spec.device}" if spec.device else "")
        + (f", shown by the condition {spec.condition}" if spec.condition else "")
        + ".",
        f"Evidence: {spec.evidence or 'none is on record'}",
        f"Taken out by {by}. Machine: {spec.hardware or 'unknown'}.",
    ]
    steps = [(_time(time_of(step.at)), step.action, step.why) for step in status.steps]
    if status.steps_dropped:
        steps.append(("", "", f"{status.steps_dropped} steps in the middle were left out"))
    return Story(
        head=tuple(escaped(line, 1_024) for line in head),
        steps=tuple((at, escaped(action), escaped(why, 1_024)) for at, action, why in steps),
        jobs=tuple(escaped(_job(job), 1_024) for job in status.jobs),
        end=_end(incident),
    )


def _job(job: IncidentJob) -> str:
    name = f"{job.namespace}/{job.name}"
    if not job.stopped_at:
        return f"{name}: it did not stop" if job.outcome else f"{name}: it has not stopped yet"
    stopped_s, text = time_of(job.stopped_at), f"{name}: stopped at {_time(time_of(job.stopped_at))}, "
    if job.resumed_at:
        waited = duration(time_of(job.resumed_at) - stopped_s)
        text += f"trained again after {waited}; {job.repeated_steps} steps were repeated"
    else:
        text += _OUTCOMES.get(job.outcome, "has not trained again yet")
    hours = f"{job.lost_seconds / 3_600.0:.2f} device-hours on {job.devices} devices"
    return f"{text}; {hours}" if job.outcome else text


def _end(incident: Incident) -> str:
    if incident.is_open:
        return f"It is open: kubectl polyreme nodes says what would bring {incident.spec.node} back."
    return f"{_ENDED.get(incident.status.ended, 'It ended')} at {_time(time_of(incident.status.ended_at))}."


def _end_s(incident: Incident, now_s: float) -> float:
    return time_of(incident.status.ended_at) or now_s


def _time(at_s: float) -> str:
    return f"{rfc3339(at_s)[:19]}Z" if at_s else ""
