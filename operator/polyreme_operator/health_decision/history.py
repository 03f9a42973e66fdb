"""The history of one node: follows its record, adds what its jobs lost, and says what is to be stored.

The node's record is the truth. What it shows and the history lacks is added whenever both are known.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from polyreme_api.incident import JOBS_MAX
from polyreme_operator.health.incidents import Incident, Kept, Sight, concerns, followed, merged, surplus
from polyreme_operator.health_decision.snapshot import IncidentWrite, NodeView, Said, Seen, Snapshot
from polyreme_operator.reconcile.incident_cost import was_moved, with_costs, with_entries
from polyreme_operator.types.views import JobView

BATCH_S = 1.0
"""Time from a change to its write, so that taints and moves go first and several changes are one write."""
COST_LOOK_S = 2.0
COST_LOOK_MAX_S = 30.0
"""How often it is checked whether a job trains again; it doubles."""


def with_history(name: str, view: NodeView | None, seen: Seen, snapshot: Snapshot) -> Seen:
    """Follow the record of a node."""
    stored, record = snapshot.incidents.get(name, {}), None if view is None else view.facts.record
    known, said = _known(seen.incidents, stored), snapshot.said.get(name, Said())
    tainted, out = view is not None and view.node.tainted, record is not None and record.state.is_out
    if said.record is not None and said.record != record:
        # It was stored and replaced since the last decision.
        seen = dataclasses.replace(seen, record=said.record)
    news = record != seen.record or bool(said.notes) or known.keys() != seen.incidents.keys() or view is None
    if tainted == out and news and (concerns(seen.record) or concerns(record) or known):
        sight = Sight(
            node=name,
            at_s=snapshot.now_s,
            record=record,
            before=seen.record,
            notes=said.notes,
            hardware="" if view is None else view.node.hardware or view.node.uid,
            rule=said.rule,
            gone=view is None,
        )
        known = followed(known, sight)
    if out or not tainted:
        # A taint without a record of it has no owner yet.
        seen = dataclasses.replace(seen, record=record)
    at_s, soon_s = seen.history_at_s, snapshot.now_s + BATCH_S
    if any(is_pending(each, stored) for each in known.values()):
        at_s = soon_s if at_s is None else min(at_s, soon_s)
    return dataclasses.replace(seen, incidents=known, history_at_s=at_s)


def with_jobs(name: str, view: NodeView | None, seen: Seen, snapshot: Snapshot) -> tuple[Seen, list[Incident]]:
    """Add the jobs of a node's incidents, and return those to store, ended ones first, to keep open ones unique."""
    stored = snapshot.incidents.get(name, {})
    out = seen.record is not None and seen.record.state.is_out and view is not None
    found, costs = {}, snapshot.costs
    known = {uid: facts for uid, facts in costs.items() if facts is not None}
    for each in sorted(seen.incidents.values(), key=lambda each: (each.is_open, each.since_s)):
        incident = with_costs(each, known, seen.record, snapshot.now_s) if costs.keys() >= open_jobs(each) else each
        if incident.is_open and out and view is not None:
            incident = with_entries(incident, _jobs_of(incident, view, snapshot.jobs))
        found[each.name] = incident
    writes = [each for each in found.values() if is_pending(each, stored) and each.name not in snapshot.refused]
    left = {each.name: each for each in found.values() if each.is_open or each.waits or each in writes}
    waits = any(each.waits for each in left.values())
    look_s = (seen.look_s or COST_LOOK_S) if waits else 0.0
    return dataclasses.replace(
        seen,
        incidents=left,
        history_at_s=snapshot.now_s + look_s if waits else None,
        look_s=min(COST_LOOK_MAX_S, 2.0 * look_s),
    ), writes


def is_pending(incident: Incident, stored: Mapping[str, Incident]) -> bool:
    """Tell whether an incident is not stored as it is."""
    return incident.name not in stored or stored[incident.name].status != incident.status


def rooms(incidents: list[Incident], snapshot: Snapshot) -> list[IncidentWrite]:
    """Return the writes of incidents, and the oldest ended ones that make room for new ones within the limits.

    Of a node's new ones, such as of a time in which none could be written, the oldest beyond its limit do not fit. One
    that fits once the end of another is stored waits for the next batch.
    """
    limits, kept, found = snapshot.limits, dict(snapshot.kept), []
    ending = {each.spec.node for each in incidents if not each.is_open and _is_open(kept.get(each.name))}
    new = Counter(each.spec.node for each in incidents if not each.uid and each.name not in kept)
    for incident in incidents:
        node, name = incident.spec.node, incident.name
        is_new = not incident.uid and name not in kept
        if is_new and new[node] > limits.of_node:
            new[node] -= 1
            found.append(IncidentWrite(incident=incident, deletes=(), fits=False))
            continue
        deletes = surplus(kept.values(), node=node, of_node=limits.of_node, of_all=limits.of_all) if is_new else []
        if deletes is None and node in ending:
            continue
        for each in deletes or ():
            del kept[each.name]
        if is_new and deletes is not None:
            # It may not be deleted for another one of this batch.
            kept[name] = Kept(name=name, node=node, uid="", ended_s=None)
        found.append(IncidentWrite(incident=incident, deletes=tuple(deletes or ()), fits=deletes is not None))
    return found


def _is_open(kept: Kept | None) -> bool:
    return kept is not None and kept.ended_s is None


def _known(ours: Mapping[str, Incident], stored: Mapping[str, Incident]) -> dict[str, Incident]:
    """Return a node's incidents as they are to be stored, where stored ones may have changed meanwhile."""
    found = {name: each for name, each in stored.items() if each.is_open or each.waits}
    for name, each in ours.items():
        other = stored.get(name)
        if other is None and each.uid:
            # Its object was deleted.
            if each.is_open:
                found[name] = dataclasses.replace(each, uid="", resource_version="")
        elif other is None or other.resource_version == each.resource_version:
            found[name] = each
        else:
            found[name] = other if other.status == each.status else merged(each, other)
    return found


def open_jobs(incident: Incident) -> set[str]:
    """Return the UIDs of the jobs whose cost is not known yet."""
    return {job.uid for job in incident.status.jobs if not job.outcome}


def _jobs_of(incident: Incident, view: NodeView, jobs: Mapping[str, JobView]) -> list[JobView]:
    """Return the jobs that have workers on a node, or were moved from it before this was written."""
    found = list(view.jobs)
    if not incident.uid:
        there = {job.uid for job in found}
        others = (jobs[uid] for uid in sorted(jobs.keys() - there) if jobs[uid].status.restart_records)
        found.extend(job for job in others if was_moved(job, incident.spec.node, incident.since_s))
    return found[:JOBS_MAX]
