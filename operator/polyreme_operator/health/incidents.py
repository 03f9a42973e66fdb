"""The history of nodes that were out of service: pure functions from a node's record to its NodeIncidents.

An incident is named by node and time of the taint, and the node's record holds both, so that a crash or a second
replica never doubles one. The same sight of a record changes nothing again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from pydantic import ValidationError

from polyreme_api import labels
from polyreme_api.errors import InvalidConfigError
from polyreme_api.incident import (
    EVIDENCE_CHARACTERS_MAX,
    JOBS_MAX,
    STEPS_MAX,
    IncidentJob,
    IncidentStep,
    NodeIncidentSpec,
    NodeIncidentStatus,
)
from polyreme_api.times import parse_rfc3339, rfc3339
from polyreme_cluster.port import Manifest
from polyreme_operator.health.facts import Note
from polyreme_operator.health.record import NodeState, Record

ENDED = "ended"
"""State of an incident that is over."""
FAULT_TABLE = "fault table"
"""Rule of an incident for which no rule of the policy decided."""
_FIRST_STEPS = 16
"""Steps at the beginning that are kept when the list is full."""
_SLUG_CHARACTERS_MAX = 39
_TIMED_BY_RECORD = frozenset({"Quarantined", "Returned", "Released", "Healthy"})
"""Steps whose time the record holds."""
_TAKEN_OUT = frozenset({"NodeQuarantined", "NodeRetired"})
_STATES = frozenset(state.value for state in NodeState if state.is_out)
_ONCE = frozenset({"Draining", "Drained", "Repairing", "Retired"})
"""Steps that follow from the state alone."""
_REPLACED_BY_NEWEST = frozenset({"Examined"})
"""Of these steps in a row only the newest is kept."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One state of a node's record, as stored."""

    node: str
    at_s: float
    """When it was seen."""
    record: Record | None = None
    """The record; None: the node is healthy and needs none."""
    before: Record | None = None
    """The record seen before, if any."""
    notes: tuple[Note, ...] = ()
    """What the decision said."""
    hardware: str = ""
    rule: str = ""
    """Rule of the policy that decided; empty: not known."""
    gone: bool = False
    """Whether the node was deleted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A NodeIncident, stored or about to be."""

    name: str
    spec: NodeIncidentSpec
    status: NodeIncidentStatus = dataclasses.field(default_factory=NodeIncidentStatus)
    uid: str = ""
    """Empty: it is not stored."""
    resource_version: str = ""

    @property
    def since_s(self) -> float:
        """When the node left service."""
        return time_of(self.spec.since)

    @property
    def is_open(self) -> bool:
        """Whether the node is not healthy yet."""
        return self.status.state != ENDED

    @property
    def waits(self) -> bool:
        """Whether the cost of a job is not known yet."""
        return any(not job.outcome for job in self.status.jobs)

    def with_status(self, **fields: object) -> Incident:
        """Return it with fields of its status replaced."""
        return dataclasses.replace(self, status=self.status.model_copy(update=fields))

    def manifest(self) -> Manifest:
        """Return the object to create; its status is written afterwards."""
        return {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_INCIDENT,
            "metadata": {"name": self.name},
            "spec": self.spec.model_dump(mode="json", by_alias=True),
        }

    def status_patch(self) -> Manifest:
        """Return the patch of its status."""
        return {"status": self.status.model_dump(mode="json", by_alias=True)}


def name_of(node: str, since_s: float) -> str:
    """Return the name of the incident of a node that left service at a time.

    The reason is no part of it: a graver fault may become the reason while the node is out.
    """
    since_ms = round(since_s * 1000)
    slug = re.sub(r"[^a-z0-9]+", "-", node.lower())[:_SLUG_CHARACTERS_MAX].strip("-") or "node"
    at = datetime.fromtimestamp(since_ms // 1000, UTC).strftime("%Y%m%d%H%M%S")
    return f"{slug}-{at}-{hashlib.sha256(f'{node} {since_ms}'.encode()).hexdigest()[:8]}"


def escaped(text: str, characters_max: int = EVIDENCE_CHARACTERS_MAX) -> str:
    """Write foreign text so that it can't steer a terminal: what is not printable is escaped; bounded."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:characters_max])
    return shown if len(shown) <= characters_max else f"{shown[: characters_max - 1]}…"


def time_of(text: str) -> float:
    """Read a time; 0 for none."""
    try:
        return parse_rfc3339(text) if text else 0.0
    except InvalidConfigError:
        return 0.0


def parse_incident(manifest: Manifest) -> Incident | None:
    """Read a stored incident; None if it can't be read, since people may write such objects too."""
    metadata = manifest["metadata"]
    try:
        spec = NodeIncidentSpec.model_validate(manifest.get("spec") or {})
        status = NodeIncidentStatus.model_validate(manifest.get("status") or {})
    except ValidationError:
        return None
    return Incident(
        name=metadata["name"],
        spec=spec,
        status=status,
        uid=metadata.get("uid") or "",
        resource_version=metadata.get("resourceVersion") or "",
    )


def concerns(record: Record | None) -> bool:
    """Tell whether a record says that its node is, or was until lately, out of service."""
    return record is not None and (record.state.is_out or record.state is NodeState.PROBATION)


def followed(known: Mapping[str, Incident], sight: Sight) -> dict[str, Incident]:
    """Return the incidents of a node after a sight of its record.

    Args:
        known: Its incidents that are open, by name, and those whose jobs are not done.
        sight: What was seen.
    """
    found, record, before = dict(known), sight.record, sight.before
    if before is not None and before.state.is_out and (name := name_of(sight.node, before.since_s)) not in found:
        # It was on record for so short a time that no decision saw it with its taint.
        found[name] = _begun(name, dataclasses.replace(sight, rule="", notes=()), before)
    if record is not None and record.state.is_out and not sight.gone:
        name = name_of(sight.node, record.since_s)
        _end_others(found, name, record.since_s)
        found[name] = _out(found.get(name) or _begun(name, sight, record), sight, record)
        return found
    return {name: _left(incident, sight) if incident.is_open else incident for name, incident in found.items()}


def merged(ours: Incident, stored: Incident) -> Incident:
    """Return an incident as it is to be stored, though its object has changed since: with the steps of both."""
    known = _ONCE & {step.action for step in stored.status.steps}
    found = dataclasses.replace(
        ours,
        spec=stored.spec,
        status=ours.status.model_copy(update={"steps": stored.status.steps}),
        uid=stored.uid,
        resource_version=stored.resource_version,
    )
    for step in ours.status.steps:
        # One that was begun before the stored one was read has these steps at another time.
        if ours.uid or step.action not in known:
            found = with_step(found, step.action, time_of(step.at), step.why)
    jobs = {job.uid: job for job in stored.status.jobs}
    entries = [jobs[job.uid] if job.uid in jobs and jobs[job.uid].outcome else job for job in ours.status.jobs]
    entries += [job for job in stored.status.jobs if job.uid not in {each.uid for each in entries}]
    return found if entries == found.status.jobs else with_jobs(found, entries[:JOBS_MAX])


def with_step(incident: Incident, action: str, at_s: float, why: str) -> Incident:
    """Add a step, unless it is there."""
    steps, dropped = list(incident.status.steps), incident.status.steps_dropped
    at, why = rfc3339(at_s), escaped(why)
    if any(step.action == action and (step.at == at or action == "Quarantined") for step in steps):
        return incident
    step = IncidentStep(at=at, action=action, why=why)
    if action in _REPLACED_BY_NEWEST and steps and steps[-1].action == action:
        steps.pop()
    steps = sorted([*steps, step], key=lambda each: each.at)
    if len(steps) > STEPS_MAX:
        del steps[_FIRST_STEPS]
        dropped += 1
    return incident.with_status(steps=steps, steps_dropped=dropped)


def with_jobs(incident: Incident, jobs: list[IncidentJob]) -> Incident:
    """Replace the jobs, and sum up what they lost."""
    lost_s = sum(job.lost_seconds for job in jobs)
    return incident.with_status(jobs=jobs, lost_seconds=lost_s, device_hours=f"{lost_s / 3600.0:.2f}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A stored incident, as far as the limits need it."""

    name: str
    node: str
    uid: str
    ended_s: float | None
    """None: it is open."""


def surplus(kept: Iterable[Kept], *, node: str, of_node: int, of_all: int) -> list[Kept] | None:
    """Return the ended incidents to delete before one more of a node is created; None if there is no room at all."""
    found = list(kept)
    ended = sorted((each for each in found if each.ended_s is not None), key=lambda each: (each.ended_s, each.name))
    own = [each for each in ended if each.node == node]
    excess = sum(each.node == node for each in found) - of_node + 1
    first = own[: max(0, excess)]
    left = [each for each in ended if each not in first]
    more = left[: max(0, len(found) - len(first) - of_all + 1)]
    deleted = [*first, *more]
    fits = len(found) - len(deleted) < of_all and excess <= len(first) + sum(each.node == node for each in more)
    return deleted if fits else None


def _begun(name: str, sight: Sight, record: Record) -> Incident:
    spec = NodeIncidentSpec(
        node=sight.node,
        hardware=escaped(sight.hardware, 253),
        device=escaped(record.device, 128),
        since=rfc3339(record.since_s),
        fault_class=escaped(record.fault_class, 63),
        reason=escaped(record.reason, 128),
        evidence=escaped(record.evidence),
        condition=escaped(record.condition, 316),
        owner=escaped(record.owner, 253),
        rule=escaped(sight.rule, 63),
    )
    incident = Incident(name=name, spec=spec).with_status(state=NodeState.QUARANTINED.value, device_hours="0.00")
    said = next((note.message for note in sight.notes if note.reason in _TAKEN_OUT), _why(record))
    return with_step(incident, "Quarantined", record.since_s, said)


def _why(fault: Record | NodeIncidentSpec) -> str:
    return f"by {fault.owner or 'an unknown owner'}: {fault.fault_class}, {fault.evidence or fault.reason}"


def _end_others(found: dict[str, Incident], name: str, at_s: float) -> None:
    """End what is open of a node that has left service again."""
    for other, incident in found.items():
        if other != name and incident.is_open:
            was = incident.status.state
            recurred = was == NodeState.PROBATION
            why = "a fault during probation" if recurred else "the node's record was replaced by another one"
            ended = with_step(incident, "Recurred" if recurred else "Replaced", at_s, f"{why}; see {name}")
            found[other] = _ended(ended, "Recurred" if recurred else "Replaced", at_s)


def _out(incident: Incident, sight: Sight, record: Record) -> Incident:
    """Note what happened to a node that is out of service."""
    for note in sight.notes:
        action = note.reason.removeprefix("Node")
        at_s = record.since_s if action in _TIMED_BY_RECORD else sight.at_s
        incident = with_step(incident, action, at_s, note.message)
    incident = with_step(incident, "Quarantined", record.since_s, _why(record))
    before = sight.before
    if before is None or not before.state.is_out or before.since_s != record.since_s:
        # The first sight of this taint; earlier ones may have been missed.
        examined = any(step.action == "Examined" for step in incident.status.steps)
        before = record if examined else record.model_copy(update={"examinations": 0})
    state = incident.status.state
    before = before.model_copy(update={"state": NodeState(state) if state in _STATES else NodeState.QUARANTINED})
    for action, why in _changes(before, record):
        incident = with_step(incident, action, sight.at_s, why)
    return incident.with_status(state=record.state.value, ended_at="", ended="")


def _changes(before: Record, after: Record) -> list[tuple[str, str]]:
    """Return what differs between two records of one taint, as steps."""
    found = []
    if (before.reason, before.leave, before.action) != (after.reason, after.leave, after.action):
        repair = f"; it needs {after.action}" if after.action else ""
        found.append(("Escalated", f"{after.reason}: {after.evidence}; workers: {after.leave}{repair}"))
    if after.examinations > before.examinations:
        at = rfc3339(after.examine_at_s)[:19]
        found.append(("Examined", f"examination {after.examinations}: the fault is not gone; the next is at {at}Z"))
    if before.state is not after.state:
        said = {
            NodeState.DRAINING: ("Draining", "workers leave by their job's failurePolicy.onNodeFault"),
            NodeState.REPAIRING: (
                "Repairing",
                f"no worker is left on it; it needs {f'a {after.action}' if after.action else 'an examination'}",
            ),
            NodeState.RETIRED: ("Retired", f"{after.evidence}; only a person returns it"),
        }.get(after.state)
        if said is None and before.state is NodeState.DRAINING:
            said = ("Drained", "no worker is left on it")
        if said is not None:
            found.append(said)
    return found


def _left(incident: Incident, sight: Sight) -> Incident:
    """Note that a node is back in service, or gone."""
    record = sight.record
    if sight.gone:
        ended = with_step(incident, "NodeDeleted", sight.at_s, "the Node object was deleted")
        return _ended(ended, "NodeDeleted", sight.at_s)
    at_s = sight.at_s if record is None or not record.since_s else max(record.since_s, incident.since_s)
    incident = with_step(incident, "Quarantined", incident.since_s, _why(incident.spec))
    for note in sight.notes:
        incident = with_step(incident, note.reason.removeprefix("Node"), at_s, note.message)
    if record is not None and record.state is NodeState.PROBATION:
        until = rfc3339(record.examine_at_s)[:19]
        why = f"examined: the fault is gone; on probation until {until}Z"
        if not any(step.action == "Returned" for step in incident.status.steps):
            incident = with_step(incident, "Returned", at_s, why)
        return incident.with_status(state=record.state.value)
    release = None if record is None else record.released
    if release is not None and release.at_s >= incident.since_s:
        why = f"by {release.by}: {release.reason or 'no reason given'}"
        if not any(step.action == "Released" for step in incident.status.steps):
            incident = with_step(incident, "Released", release.at_s, why)
        return _ended(incident, "Released", release.at_s)
    if not any(step.action in {"Healthy", "Returned"} for step in incident.status.steps):
        incident = with_step(incident, "Returned", at_s, "the taint is gone")
    return _ended(incident, "Healthy", at_s)


def _ended(incident: Incident, how: str, at_s: float) -> Incident:
    return incident.with_status(state=ENDED, ended=how, ended_at=rfc3339(at_s))
