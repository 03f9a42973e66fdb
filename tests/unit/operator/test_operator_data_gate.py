"""A job holds no devices before its data is ready, and no report on data can stop the operator."""

import asyncio
import dataclasses
from typing import Any, Literal

import pytest

from polyreme_api.data_report import ANNOTATION_DATA, REPORT_BYTES_MAX, DataReport, DataState, data_digest
from polyreme_api.fields import Condition
from polyreme_operator.cache.jobs import waits
from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.data_gate import readiness
from polyreme_operator.reconcile.rebase import rebased
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.parse import parse_job_view
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, job_manifest
from tests.unit.operator.operator_stage import Stage

SOON_S = 5.0
HALF = [{"operation": "ingest", "done": 10, "total": 10}, {"operation": "decode", "done": 400, "total": 1000}]
ABOUT = data_digest(job().spec)  # type: ignore[arg-type]


def gated() -> Stage:
    stage = Stage(Settings(retry_max_s=5.0, data_gate=True))
    stage.add_nodes(4)
    return stage


def of(stage: Stage, kind: str, name: str = "j") -> tuple[str, str, str]:
    found = stage.condition(name, kind)
    return found.get("status", ""), found.get("reason", ""), found.get("message", "")


def test_a_job_waits_with_its_progress_and_is_admitted_when_its_data_is_ready() -> None:
    stage = gated()

    async def story() -> None:
        stage.add_job("j")
        await asyncio.sleep(SOON_S)
        assert of(stage, "DataReady")[:2] == ("False", "NotReported")
        assert of(stage, "Queued")[:2] == ("True", "WaitingForData")
        stage.report_data("j", DataState.PROCESSING, progress=HALF)
        await asyncio.sleep(SOON_S)
        assert of(stage, "Queued") == ("True", "WaitingForData", "waiting for data: decode 400 of 1,000")
        assert of(stage, "DataReady") == ("False", "Processing", "decode 400 of 1,000")
        assert not stage.status("j").get("attempt")
        stage.report_data("j", DataState.PROCESSED, message="82 samples; 39 records are dead letters")
        await asyncio.sleep(SOON_S)
        assert of(stage, "Admitted")[0] == "True"
        assert of(stage, "DataReady") == ("True", "DataProcessed", "82 samples; 39 records are dead letters")
        assert stage.events("DataProcessed")

    stage.run(story)


def test_a_job_that_starts_while_its_data_is_processed_is_admitted_with_the_first_blocks() -> None:
    stage = gated()

    async def story() -> None:
        stage.add_job("j")
        stage.report_data("j", DataState.READABLE, message="1 of 9 blocks can be trained on")
        await asyncio.sleep(SOON_S)
        assert of(stage, "Admitted")[0] == "True"
        assert of(stage, "DataReady") == ("True", "DataReadable", "1 of 9 blocks can be trained on")

    stage.run(story)


@pytest.mark.parametrize(
    ("state", "queued", "reason"),
    [
        (DataState.REFUSED, "DataRefused", "DataRefused"),
        (DataState.FAILED, "WaitingForData", "ProcessingFailed"),
        (DataState.MISSING, "WaitingForData", "DataMissing"),
    ],
)
def test_every_other_state_keeps_the_job_waiting_and_names_the_error(
    state: DataState, queued: str, reason: str
) -> None:
    stage = gated()

    async def story() -> None:
        stage.add_job("j")
        stage.report_data("j", state, message="no good record in a/b: 39 of 39 are dead letters")
        await asyncio.sleep(SOON_S)
        assert of(stage, "Queued")[:2] == ("True", queued)
        assert "39 of 39 are dead letters" in of(stage, "Queued")[2]
        assert of(stage, "DataReady")[:2] == ("False", reason)
        assert stage.events(reason)
        assert not stage.status("j").get("attempt")

    stage.run(story)


MALFORMED = {
    "text": "{",
    "another shape": "[]",
    "another state": f'{{"state": "Done", "about": "{ABOUT}"}}',
    "huge": '{"state": "Processed", "about": "' + "x" * REPORT_BYTES_MAX + '"}',
    "deep": "[" * 4000,
    "huge numbers": f'{{"state":"Processed","about":"{ABOUT}","progress":[{{"operation":"a","done":1e400}}]}}',
    "not a number": '{"state": NaN}',
    "lone surrogate": '{"state": "Processed", "about": "\\ud800"}',
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_report_admits_nothing_and_stops_no_other_job(text: str) -> None:
    stage = gated()

    async def story() -> None:
        stage.add_job("j")
        stage.annotate("j", text)
        stage.add_job("fine")
        stage.report_data("fine", DataState.PROCESSED)
        await asyncio.sleep(SOON_S)
        assert of(stage, "DataReady")[:2] == ("False", "ReportUnreadable")
        assert ANNOTATION_DATA in of(stage, "DataReady")[2]
        assert of(stage, "Admitted")[0] != "True"
        assert of(stage, "Degraded")[0] != "True"
        assert of(stage, "Admitted", "fine")[0] == "True"

    stage.run(story)


def test_a_report_on_another_spec_counts_as_none() -> None:
    stage = gated()

    async def story() -> None:
        stage.add_job("j")
        stage.report_data("j", DataState.PROCESSED, about="another")
        await asyncio.sleep(SOON_S)
        assert of(stage, "DataReady")[:2] == ("False", "NotReported")
        assert "another data spec" in of(stage, "Queued")[2]
        assert of(stage, "Admitted")[0] != "True"

    stage.run(story)


def test_a_lost_report_takes_nothing_from_a_job_that_was_admitted_but_missing_data_does() -> None:
    stage = gated()

    async def story() -> None:
        uid = stage.add_job("j")
        stage.report_data("j", DataState.PROCESSED)
        await asyncio.sleep(SOON_S)
        await stage.report("j", uid, attempt=1, phase="Training", step=5)
        stage.annotate("j", None)
        await asyncio.sleep(SOON_S)
        assert of(stage, "Admitted")[0] == "True"
        assert of(stage, "DataReady")[:2] == ("True", "DataProcessed")
        await stage.report("j", uid, attempt=1, phase="Training", step=6, exits=[{"rank": 0, "signal": 9}])
        await asyncio.sleep(SOON_S)
        assert stage.status("j")["attempt"]["number"] == 2, "a restart does not wait"
        stage.report_data("j", DataState.MISSING)
        await asyncio.sleep(SOON_S)
        assert (of(stage, "Admitted")[0], of(stage, "DataReady")[1]) == ("True", "DataMissing")

    stage.run(story)


def test_without_the_gate_no_job_waits_and_a_report_is_still_shown() -> None:
    stage = Stage()
    stage.add_nodes(2)

    async def story() -> None:
        stage.add_job("plain")
        stage.add_job("told")
        stage.report_data("told", DataState.PROCESSING, progress=HALF)
        await asyncio.sleep(SOON_S)
        assert of(stage, "Admitted", "plain")[0] == of(stage, "Admitted", "told")[0] == "True"
        assert of(stage, "DataReady", "plain")[0] == ""
        assert of(stage, "DataReady", "told")[:2] == ("False", "Processing")

    stage.run(story)


def view(state: DataState | None, *, before: JobView | None = None, **fields: Any) -> JobView:
    manifest = job_manifest(**fields)
    if state is not None:
        text = DataReport(state=state, about=ABOUT).to_annotation()
        manifest["metadata"]["annotations"] = {ANNOTATION_DATA: text}
    seen = parse_job_view(manifest, data_gate=True)
    return dataclasses.replace(
        seen, plans=job().plans, planning=None, status=seen.status if before is None else before.status
    )


def test_a_job_of_another_runtime_or_with_a_lost_report_of_an_earlier_attempt_waits_for_no_data() -> None:
    manifest = job_manifest(workers={"replicas": 2, "runtime": {"mode": "Environment"}})
    for part in ("model", "data", "training"):
        del manifest["spec"][part]
    other = dataclasses.replace(parse_job_view(manifest, data_gate=True), plans=job().plans, planning=None)
    assert waits(other)
    assert not waits(view(None))
    assert waits(view(DataState.PROCESSED))
    ran = admitted(view(DataState.PROCESSED))
    status = ran.status.model_copy(
        update={"conditions": [each for each in ran.status.conditions if each.type != "Admitted"]}
    )
    preempted = dataclasses.replace(ran, status=status)
    assert waits(view(None, before=preempted)), "lost"
    assert not waits(view(DataState.MISSING, before=preempted))


def test_an_admission_is_not_carried_over_to_a_job_whose_data_is_missing_since() -> None:
    before = view(DataState.PROCESSED)
    write = WriteStatus(
        ref=before.ref,
        uid=before.uid,
        resource_version=before.resource_version,
        before=before.status,
        after=transition.admit(before, ("n0", "n0"), NOW_S),
    )
    assert rebased(write, view(DataState.PROCESSED, version=2, before=before)).resource_version == "2"
    assert rebased(write, view(DataState.MISSING, version=2, before=before)).resource_version == "1", "it conflicts"


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_lost_report_takes_nothing_from_a_job_whose_data_was_ready(was_ready: bool) -> None:
    status: Literal["True", "False"] = "True" if was_ready else "False"
    said = Condition(type="DataReady", status=status, reason="DataProcessed", message="82 samples")
    found = readiness(admitted(job(), conditions=[said]))
    assert (found is not None and found.ready) == was_ready
