"""What an incident costs a job: from its stop to its first new step, plus repeated steps, times all devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polyreme_api.fields import Condition
from polyreme_api.incident import IncidentJob, NodeIncidentSpec
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import AttemptStatus, RestartRecord, TrainingJobStatus
from polyreme_api.progress import ProgressRecord
from polyreme_api.times import rfc3339
from polyreme_operator.health.incidents import Incident
from polyreme_operator.health.record import Leave, NodeState, Record
from polyreme_operator.reconcile.incident_cost import JobFacts, was_moved, with_costs, with_entries
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import job_manifest

SINCE_S = 1_000.0
OUT = Record(state=NodeState.DRAINING, leave=Leave.DRAIN, since_s=SINCE_S)


def _job(number: int, nodes: list[str], *stops: tuple[int, float, int], **status: Any) -> JobView:
    records = [
        RestartRecord(
            attempt=attempt,
            at=rfc3339(at_s),
            cause="NodeFault",
            scope="RestartPod",
            step=step,
            message="node n1 is lost",
        )
        for attempt, at_s, step in stops
    ]
    attempt = AttemptStatus(number=number, plan_hash="p", replicas=2, devices=4, placement=Placement.of(nodes))
    said = TrainingJobStatus(attempt=attempt, restart_records=records, **status)
    return JobView(
        namespace="team",
        name="big",
        uid="u",
        resource_version="1",
        generation=1,
        created_s=0.0,
        deleting=False,
        spec=None,
        invalid="",
        status=said,
    )


def _progress(attempt: int, step: int, *, began: int, at_s: float) -> ProgressRecord:
    return ProgressRecord(attempt=attempt, step=step, resumed_from_step=began, step_seconds=2.0, updated_at_s=at_s)


def _cost(job: JobView | None, progress: ProgressRecord | None = None, *, ended: bool = False) -> IncidentJob:
    incident = Incident(name="i", spec=NodeIncidentSpec(node="n1", since=rfc3339(SINCE_S)))
    incident = with_entries(incident, [_job(1, ["n1", "n2"])])
    if ended:
        incident = incident.with_status(state="ended")
    known = {} if job is None else {"u": JobFacts(job=job, progress=progress)}
    return with_costs(incident, known, OUT, 1_200.0).status.jobs[0]


def test_a_gang_counts_from_its_stop_to_its_first_new_step_and_repeats_what_was_not_saved() -> None:
    moved = _job(2, ["n3", "n2"], (1, 1_005.0, 110))
    cost = _cost(moved, _progress(2, 103, began=100, at_s=1_076.0))
    # Its first new step began at 1,070, six seconds before the report of three steps; ten steps of 2 s were repeated.
    assert (cost.outcome, cost.repeated_steps, cost.lost_seconds) == ("Resumed", 10, 8 * (65 + 20))
    assert _cost(moved, _progress(2, 100, began=100, at_s=1_076.0)).outcome == ""


def test_ranks_that_died_of_the_fault_before_it_was_seen_count_from_then() -> None:
    again = _job(2, ["n1", "n2"], (1, 990.0, 110))
    assert _cost(again, _progress(2, 101, began=100, at_s=1_000.0)).outcome == "", "it must leave the node yet"
    moved = _job(3, ["n3", "n2"], (1, 990.0, 110), (2, 1_002.0, 101))
    cost = _cost(moved, _progress(3, 101, began=100, at_s=1_032.0))
    assert (cost.attempt, cost.repeated_steps, cost.lost_seconds) == (1, 10, 8 * (40 + 20))


@pytest.mark.parametrize(
    ("kind", "outcome"), [("Succeeded", "Finished"), ("Suspended", "Suspended"), ("Preempted", "Preempted")]
)
def test_a_job_that_ends_otherwise_counts_until_then(kind: str, outcome: str) -> None:
    said = [Condition(type=kind, status="True", reason="R", last_transition_time=rfc3339(1_025.0))]
    cost = _cost(_job(1, ["n1", "n2"], (1, 1_005.0, 110), conditions=said))
    assert (cost.outcome, cost.lost_seconds) == (outcome, 8 * 20)


def test_a_job_that_stayed_or_was_deleted_before_it_stopped_lost_nothing() -> None:
    stayed, deleted = _cost(_job(1, ["n1", "n2"]), ended=True), _cost(None)
    assert [(each.outcome, each.lost_seconds) for each in (stayed, deleted)] == [("Stayed", 0), ("Deleted", 0)]


@pytest.mark.parametrize("ends", [False, True], ids=["waits", "failed"])
def test_a_job_that_had_not_trained_on_the_node_lost_nothing(ends: bool) -> None:
    failed = [Condition(type="Failed", status="True", reason="R", last_transition_time=rfc3339(1_100.0))]
    cost = _cost(_job(2, ["n3", "n2"], (1, 1_005.0, 0), conditions=failed if ends else []))
    assert (cost.outcome, cost.stopped_at, cost.lost_seconds) == ("NeverTrained", rfc3339(1_005.0), 0)
    # It began there at a checkpoint, and reached no new step.
    again = _job(3, ["n3", "n2"], (1, 900.0, 110), (2, 1_005.0, 100))
    first, second = again.status.restart_records
    records = [first.model_copy(update={"checkpoint_step": 100}), second]
    again = dataclasses.replace(again, status=again.status.model_copy(update={"restart_records": records}))
    assert _cost(again).outcome == "NeverTrained"


def test_a_job_with_its_own_launcher_counts_until_its_next_attempt_runs() -> None:
    fields = job_manifest()["spec"] | {"workers": {"replicas": 2, "runtime": {"mode": "Environment"}}}
    spec = TrainingJobSpec.model_validate(fields)
    runs = [Condition(type="Running", status="True", reason="Training", last_transition_time=rfc3339(1_025.0))]
    moved = dataclasses.replace(_job(2, ["n3", "n2"], (1, 1_005.0, 0), conditions=runs), spec=spec)
    cost = _cost(moved)
    assert (cost.outcome, cost.lost_seconds) == ("Resumed", 8 * 20)
    waits = dataclasses.replace(_job(2, ["n3", "n2"], (1, 1_005.0, 0)), spec=spec)
    assert _cost(waits).outcome == ""


def test_a_move_is_found_by_the_node_s_whole_name() -> None:
    job = _job(2, ["n3", "n2"], (1, 1_005.0, 110))
    assert was_moved(job, "n1", SINCE_S)
    assert not was_moved(job, "n", SINCE_S)
    assert not was_moved(job, "n1", 2_000.0)


def test_ranks_that_resume_on_a_node_that_they_need_not_leave_have_resumed() -> None:
    incident = Incident(name="i", spec=NodeIncidentSpec(node="n1", since=rfc3339(SINCE_S)))
    again = _job(2, ["n1", "n2"], (1, 1_005.0, 110))
    incident = with_entries(incident, [_job(1, ["n1", "n2"])])
    known = {"u": JobFacts(job=again, progress=_progress(2, 101, began=100, at_s=1_050.0))}
    for leave, outcome in ((Leave.STAY, "Resumed"), (Leave.DRAIN, "")):
        record = Record(state=NodeState.QUARANTINED, leave=leave, since_s=SINCE_S)
        assert with_costs(incident, known, record, 1_200.0).status.jobs[0].outcome == outcome
