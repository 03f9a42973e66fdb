"""The datahub's controller beside the real operator: jobs wait for their data, oldest first, whatever fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_api.data_report import ANNOTATION_DATA, DataState
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, PolyremeError
from polyreme_api.job import TrainingJob
from polyreme_cluster.port import ObjectRef
from polyreme_datahub_service.controller import CHECK_EVERY_S, REFUSED_RETRY_S, RETRY_S, DataController, Prepared
from polyreme_datahub_service.reporter import PROGRESS_EVERY_S
from polyreme_operator.settings import Settings
from tests.unit.operator.operator_stage import Stage

TAKES_S = 20.0
SOON_S = 3.0


class Pipeline:
    """Stands for the pipeline: takes its time, and fails as the test sets."""

    def __init__(self, takes_s: float = TAKES_S) -> None:
        self.takes_s = takes_s
        self.began: list[str] = []
        self.ended: list[str] = []
        self.forgotten: list[str] = []
        self.errors: list[PolyremeError] = []
        self.gone: set[str] = set()
        self.left: set[str] = set()
        self.most = 0
        self._at_work = 0

    async def prepare(self, job: TrainingJob, progress: Callable[[Mapping[str, Any]], None]) -> Prepared:
        self.began.append(job.metadata.name)
        self._at_work += 1
        self.most = max(self.most, self._at_work)
        try:
            if self.errors:
                raise self.errors.pop(0)
            for done in range(100):
                progress({"stage": "decode", "done": done, "total": 100})
                await asyncio.sleep(self.takes_s / 100)
        finally:
            self._at_work -= 1
        self.ended.append(job.metadata.name)
        self.gone.discard(job.metadata.name)
        return Prepared(plan="plans/p.json", message="82 samples; 39 records are dead letters")

    async def is_whole(self, job: TrainingJob) -> bool:
        return job.metadata.name not in self.gone

    async def kept(self) -> set[str]:
        return set(self.left)

    async def forget(self, uid: str) -> None:
        self.forgotten.append(uid)


def gated() -> Stage:
    stage = Stage(Settings(retry_max_s=5.0, data_gate=True))
    stage.add_nodes(8)
    return stage


@contextlib.asynccontextmanager
async def controlling(stage: Stage, pipeline: Pipeline, jobs_max: int = 2) -> AsyncIterator[None]:
    controller = DataController(stage.cluster, pipeline, stage.clock, jobs_max=jobs_max)
    task = asyncio.ensure_future(controller.run())
    try:
        yield
        assert not task.done(), "the controller ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def of(stage: Stage, name: str, kind: str) -> tuple[str, str]:
    found = stage.condition(name, kind)
    return found.get("status", ""), found.get("reason", "")


def admitted(stage: Stage, name: str) -> bool:
    return of(stage, name, "Admitted")[0] == "True"


def version(stage: Stage, name: str) -> int:
    ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name)
    return int(stage.store.get(ref)["metadata"]["resourceVersion"])


def test_data_is_prepared_oldest_first_a_bounded_number_at_once_and_then_jobs_are_admitted() -> None:
    stage, pipeline = gated(), Pipeline()

    async def story() -> None:
        for name in ("first", "second", "third"):
            stage.add_job(name)
            await asyncio.sleep(1.0)
        async with controlling(stage, pipeline):
            await asyncio.sleep(TAKES_S / 2)
            assert pipeline.began == ["first", "second"]
            assert not admitted(stage, "first")
            assert stage.condition("first", "Queued")["message"].startswith("waiting for data: decode ")
            await asyncio.sleep(TAKES_S / 2 + SOON_S)
            assert admitted(stage, "first")
            assert admitted(stage, "second")
            assert not admitted(stage, "third")
            await asyncio.sleep(TAKES_S + SOON_S)
            assert admitted(stage, "third")
        assert (pipeline.began, pipeline.most) == (["first", "second", "third"], 2), "each once"
        assert stage.condition("first", "DataReady")["message"] == "82 samples; 39 records are dead letters"

    stage.run(story)


def test_progress_is_written_at_a_bounded_rate_and_only_on_change() -> None:
    stage, pipeline = Stage(Settings(retry_max_s=5.0)), Pipeline(takes_s=100.0)
    writes = 0

    async def story() -> None:
        nonlocal writes
        stage.add_job("j")
        seen: set[str] = set()
        async with controlling(stage, pipeline):
            for _ in range(1000):
                await asyncio.sleep(0.1)
                ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j")
                seen.add((stage.store.get(ref)["metadata"].get("annotations") or {}).get(ANNOTATION_DATA, ""))
            await asyncio.sleep(30.0)
            before = version(stage, "j")
            await asyncio.sleep(60.0)
            assert version(stage, "j") == before, "nothing is written when nothing changes"
        writes = len(seen)

    stage.run(story)
    assert 10 < writes <= 100.0 / PROGRESS_EVERY_S + 4


@pytest.mark.parametrize(
    ("error", "reason", "wait_s"),
    [
        (EnvironmentFailedError("no space left: /data"), "ProcessingFailed", RETRY_S),
        (
            InvalidConfigError("dataset a/b has no good record: 39 records are dead letters"),
            "DataRefused",
            REFUSED_RETRY_S,
        ),
    ],
)
def test_an_error_is_shown_while_the_job_waits_and_tried_again(
    error: PolyremeError, reason: str, wait_s: float
) -> None:
    stage, pipeline = gated(), Pipeline(takes_s=1.0)
    pipeline.errors = [error]

    async def story() -> None:
        stage.add_job("j")
        async with controlling(stage, pipeline):
            await asyncio.sleep(SOON_S)
            assert of(stage, "j", "DataReady") == ("False", reason)
            assert str(error) in stage.condition("j", "Queued")["message"]
            assert len(pipeline.began) == 1
            await asyncio.sleep(wait_s + SOON_S)
            assert admitted(stage, "j")
        assert len(pipeline.began) == 2

    stage.run(story)


def test_failures_in_a_row_are_tried_again_at_growing_intervals() -> None:
    stage, pipeline = gated(), Pipeline()
    pipeline.errors = [EnvironmentFailedError("the store is away") for _ in range(100)]

    async def story() -> None:
        stage.add_job("j")
        async with controlling(stage, pipeline):
            await asyncio.sleep(600.0)
        assert 5 <= len(pipeline.began) <= 9

    stage.run(story)


def test_a_controller_that_is_killed_is_continued_by_the_next_one() -> None:
    stage, pipeline = gated(), Pipeline()

    async def story() -> None:
        stage.add_job("j")
        async with controlling(stage, pipeline):
            await asyncio.sleep(TAKES_S / 2)
        assert pipeline.ended == []
        await asyncio.sleep(SOON_S)
        assert of(stage, "j", "DataReady") == ("False", "Processing")
        async with controlling(stage, pipeline):
            await asyncio.sleep(TAKES_S + SOON_S)
            assert admitted(stage, "j")
        assert pipeline.ended == ["j"]

    stage.run(story)


def test_work_for_a_job_that_is_deleted_stops_and_is_forgotten() -> None:
    stage, pipeline = gated(), Pipeline()

    async def story() -> None:
        uid = stage.add_job("j")
        async with controlling(stage, pipeline, jobs_max=1):
            await asyncio.sleep(TAKES_S / 2)
            stage.store.delete(ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j"), uid=None)
            stage.add_job("next")
            await asyncio.sleep(SOON_S)
            assert pipeline.began == ["j", "next"]
            assert pipeline.forgotten == [uid]

    stage.run(story)


@pytest.mark.parametrize("spec", ["oops", [], {}, {"data": 7, "workers": "two"}], ids=str)
def test_a_malformed_job_stops_no_other_job(spec: object) -> None:
    stage, pipeline = gated(), Pipeline(takes_s=1.0)

    async def story() -> None:
        metadata = {"name": "malformed", "namespace": "default"}
        head = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB, "metadata": metadata}
        stage.store.create({**head, "spec": spec})
        stage.add_job("fine")
        async with controlling(stage, pipeline):
            await asyncio.sleep(2 * SOON_S)
            assert admitted(stage, "fine")
        assert pipeline.began == ["fine"]

    stage.run(story)


def test_a_suspended_job_asks_for_no_data_and_keeps_what_it_has() -> None:
    stage, pipeline = gated(), Pipeline()

    async def story() -> None:
        stage.add_job("j")
        ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j")
        async with controlling(stage, pipeline):
            await asyncio.sleep(TAKES_S / 2)
            stage.store.change(ref, {"spec": {"suspend": True}})
            await asyncio.sleep(2 * TAKES_S)
            assert (pipeline.began, pipeline.ended, pipeline.forgotten) == (["j"], [], [])
            stage.store.change(ref, {"spec": {"suspend": False}})
            await asyncio.sleep(TAKES_S + SOON_S)
            assert admitted(stage, "j")
            stage.store.change(ref, {"spec": {"suspend": True}})
            await asyncio.sleep(SOON_S)
            assert pipeline.forgotten == []

    stage.run(story)


def test_data_that_is_gone_is_reported_and_made_again_and_the_job_keeps_its_devices() -> None:
    stage, pipeline = gated(), Pipeline(takes_s=1.0)

    async def story() -> None:
        uid = stage.add_job("j")
        async with controlling(stage, pipeline):
            await asyncio.sleep(SOON_S)
            await stage.report("j", uid, attempt=1, phase="Training", step=5)
            pipeline.gone = {"j"}
            for _ in range(int(CHECK_EVERY_S * 2)):
                await asyncio.sleep(1.0)
                assert admitted(stage, "j")
            assert pipeline.ended == ["j", "j"]
            assert of(stage, "j", "DataReady") == ("True", "DataProcessed")
            assert stage.events("DataMissing")

    stage.run(story)


def test_a_report_that_is_malformed_or_about_other_data_is_replaced() -> None:
    stage, pipeline = gated(), Pipeline(takes_s=1.0)

    async def story() -> None:
        stage.add_job("j")
        stage.annotate("j", "{")
        stage.add_job("k")
        stage.report_data("k", DataState.PROCESSED, about="another")
        async with controlling(stage, pipeline):
            await asyncio.sleep(2 * SOON_S)
            assert admitted(stage, "j")
            assert admitted(stage, "k")

    stage.run(story)


def test_jobs_that_ended_while_no_controller_ran_are_released_at_its_start() -> None:
    stage, pipeline = gated(), Pipeline()

    async def story() -> None:
        uid = stage.add_job("j")
        pipeline.left = {uid, "uid-of-a-job-that-is-gone"}
        async with controlling(stage, pipeline):
            await asyncio.sleep(SOON_S)
            assert pipeline.forgotten == ["uid-of-a-job-that-is-gone"]

    stage.run(story)
