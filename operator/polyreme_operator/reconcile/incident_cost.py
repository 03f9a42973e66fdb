"""Cost of a node's incident to the jobs that had workers there: from restart records and progress, pure."""

from __future__ import annotations

import dataclasses
import re

from polyreme_api.incident import JOBS_MAX, IncidentJob
from polyreme_api.job.status import RestartRecord
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.health.incidents import Incident, with_jobs, with_step
from polyreme_operator.health.record import Leave, Record
from polyreme_operator.reconcile import environment_runtime
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

BEFORE_S = 60.0
"""Restarts so long before the taint count, since a fault may end ranks before it is seen as a fault."""
GIVEN_UP_S = 7 * 86_400.0
"""A job that has not trained again so long after its stop is not waited for any more."""
_ENDS = (("Succeeded", "Finished"), ("Failed", "Finished"), ("Suspended", "Suspended"), ("Preempted", "Preempted"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What is known of a job."""

    job: JobView
    progress: ProgressRecord | None = None
    """The current attempt's report."""


def entry_of(job: JobView) -> IncidentJob:
    """Return the entry of a job that has workers on a node which leaves service."""
    attempt = job.status.attempt
    return IncidentJob(
        uid=job.uid,
        namespace=job.namespace,
        name=job.name,
        attempt=0 if attempt is None else attempt.number,
        devices=0 if attempt is None else attempt.replicas * attempt.devices,
    )


def was_moved(job: JobView, node: str, since_s: float) -> bool:
    """Tell whether a restart of a job after a time names a node: for a history that is rebuilt after a crash."""
    pattern = re.compile(rf"\bnode {re.escape(node)}(?![\w.-])")
    return any(pattern.search(record.message) for record in _stops(job, since_s - BEFORE_S))


def with_entries(incident: Incident, jobs: list[JobView]) -> Incident:
    """Add jobs that had workers on the node."""
    known = {entry.uid for entry in incident.status.jobs}
    more = [entry_of(job) for job in jobs if job.uid not in known]
    return with_jobs(incident, [*incident.status.jobs, *more][:JOBS_MAX]) if more else incident


def with_costs(incident: Incident, known: dict[str, JobFacts], record: Record | None, now_s: float) -> Incident:
    """Follow the jobs of an incident whose cost is not known yet.

    Args:
        incident: The incident.
        known: Its jobs that still exist, by UID.
        record: The node's record.
        now_s: The time.
    """
    entries = []
    for before in incident.status.jobs:
        entry = before
        if not entry.outcome:
            entry, said = _followed(entry, known.get(entry.uid), incident, record, now_s)
            for action, at_s, why in said:
                incident = with_step(incident, action, at_s, why)
        entries.append(entry)
    return incident if entries == incident.status.jobs else with_jobs(incident, entries)


_Said = list[tuple[str, float, str]]


def _followed(
    entry: IncidentJob, facts: JobFacts | None, incident: Incident, record: Record | None, now_s: float
) -> tuple[IncidentJob, _Said]:
    said: _Said = []
    stops = [] if facts is None else _stops(facts.job, incident.since_s - BEFORE_S)
    if facts is not None and not entry.stopped_at and stops:
        first = stops[0]
        entry = entry.model_copy(update={"stopped_at": first.at, "attempt": first.attempt})
        said.append(("WorkStopped", parse_time_or(first.at, now_s), _why_stopped(facts.job, first)))
    stopped_s = parse_time_or(entry.stopped_at, None)
    if facts is not None and stops and not _trained(facts.job, stops[0]):
        return _closed(entry, "NeverTrained", None, now_s, 0.0), said
    ended = _end(facts, now_s)
    if ended is not None:
        outcome, at_s = ended
        return _closed(entry, outcome, stopped_s, at_s, 0.0), said
    assert facts is not None, "a job that is deleted has ended"
    if stopped_s is None:
        return (entry if incident.is_open else _closed(entry, "Stayed", None, now_s, 0.0)), said
    resumed = _resumed(facts, stops, incident, record)
    if resumed is not None:
        at_s, repeated, repeated_s = resumed
        at_s = min(max(at_s, stopped_s), max(now_s, stopped_s))
        update = {"resumed_at": rfc3339(at_s), "repeated_steps": repeated}
        entry = _closed(entry.model_copy(update=update), "Resumed", stopped_s, at_s, repeated_s)
        why = f"job {entry.namespace}/{entry.name} trains again after {at_s - stopped_s:.1f} s"
        why += f", {repeated} steps were repeated; {entry.lost_seconds / 3600:.2f} device-hours lost"
        said.append(("WorkResumed", at_s, why))
    elif now_s - stopped_s > GIVEN_UP_S:
        entry = _closed(entry, "GivenUp", stopped_s, now_s, 0.0)
    return entry, said


def _stops(job: JobView, since_s: float) -> list[RestartRecord]:
    return [each for each in job.status.restart_records if parse_time_or(each.at, 0.0) >= since_s]


def _why_stopped(job: JobView, stop: RestartRecord) -> str:
    asked = "" if job.spec is None else f", failurePolicy.onNodeFault: {job.spec.failure_policy.on_node_fault.action}"
    return f"job {job.namespace}/{job.name} ({stop.cause}{asked}): {stop.message}"


def _trained(job: JobView, stop: RestartRecord) -> bool:
    """Tell whether an attempt had trained a new step when it ended: one that had not has lost no work and no time.

    What containers without our launcher do is not known, so they count from their start.
    """
    if _has_own_launcher(job):
        return True
    before = [each.checkpoint_step for each in job.status.restart_records if each.attempt < stop.attempt]
    return stop.step > max(before, default=0)


def _has_own_launcher(job: JobView) -> bool:
    return job.spec is not None and environment_runtime.is_used(job.spec)


def _end(facts: JobFacts | None, now_s: float) -> tuple[str, float] | None:
    """Return how and when a job ended, or stopped for another reason; None if it did not."""
    if facts is None:
        return "Deleted", now_s
    for kind, outcome in _ENDS:
        found = facts.job.status.condition(kind)
        if found is not None and found.status == "True":
            return outcome, parse_time_or(found.last_transition_time, now_s)
    return None


def _resumed(
    facts: JobFacts, stops: list[RestartRecord], incident: Incident, record: Record | None
) -> tuple[float, int, float] | None:
    """Return when the first new step began, the steps that were repeated and their time; None before it."""
    attempt, progress = facts.job.status.attempt, facts.progress
    if attempt is None or not stops or attempt.number <= stops[-1].attempt:
        return None
    if _has_own_launcher(facts.job):
        running = facts.job.status.condition("Running")
        runs = running is not None and running.status == "True"
        return (parse_time_or(running.last_transition_time, 0.0), 0, 0.0) if running is not None and runs else None
    if progress is None:
        return None
    began = progress.resumed_from_step or 0
    if progress.step <= began:
        return None
    leaves = incident.is_open and record is not None and record.leave is not Leave.STAY
    if leaves and incident.spec.node in attempt.placement.node_by_index():
        # It has restarted on the faulty node, and must leave it yet.
        return None
    step_s = progress.step_seconds or 0.0
    repeated = max(0, max(stop.step for stop in stops) - began)
    return progress.updated_at_s - (progress.step - began) * step_s, repeated, repeated * step_s


def _closed(entry: IncidentJob, outcome: str, stopped_s: float | None, at_s: float, repeated_s: float) -> IncidentJob:
    waited_s = 0.0 if stopped_s is None else max(0.0, at_s - stopped_s)
    return entry.model_copy(update={"outcome": outcome, "lost_seconds": round((waited_s + repeated_s) * entry.devices)})
