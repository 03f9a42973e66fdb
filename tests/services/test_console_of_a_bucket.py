"""The console of a cluster on a real S3 server: curves and stored lines of a job, and what keeps them away."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from polyreme.console.commands import Commands
from polyreme.console.run_source import RunName
from polyreme.plugin.console import bucket_reader
from polyreme.plugin.console.bucket_reader import NO_CREDENTIALS, BucketReader
from polyreme.plugin.console.past_records import PastRecords
from polyreme.plugin.console.source import ClusterSource
from polyreme.run_files.stored_logs import PATIENCE
from polyreme_api.errors import RefusedError
from polyreme_api.history import ResumePoint, attempt_key
from polyreme_api.labels import KIND_JOB
from polyreme_api.progress import StepRecord
from polyreme_api.store import StoreFailedError
from polyreme_cluster.port import ObjectRef
from polyreme_datahub.objects import open_store
from polyreme_system.clock import SystemClock
from polyreme_trainer.train.records import open_step_log
from tests.contract.bucket_run import STEPS, status_of, write_record, write_run
from tests.contract.run_sources import STORY_S, job_of, reach_embedded_cluster
from tests.unit.console.test_console_cluster import stage
from tools.s3.server import BucketServer

pytestmark = pytest.mark.services

RUN = RunName(namespace="default", name="far")
CURVE = 'aria-label="loss over step of far'
Ask = Callable[[ClusterSource], Awaitable[None]]


def told(folder: Path, bucket: str, ask: Ask, *, buckets: BucketReader | None) -> None:
    """Ask the source of a cluster with a job whose checkpoints are in the bucket."""

    async def story() -> None:
        clock = SystemClock()
        async with reach_embedded_cluster() as reach, asyncio.timeout(STORY_S):
            await reach.cluster.create(job_of(RUN.namespace, RUN.name))
            ref = ObjectRef(kind=KIND_JOB, namespace=RUN.namespace, name=RUN.name)
            await reach.cluster.patch(ref, {"status": status_of(bucket)}, subresource="status")
            commands = Commands(folder, clock)
            await ask(ClusterSource(reach, commands, clock, namespace=RUN.namespace, buckets=buckets))

    asyncio.run(story())


def test_curves_and_lines_of_a_job_are_read_from_its_bucket(bucket: str, tmp_path: Path) -> None:
    write_run(bucket)

    async def ask(source: ClusterSource) -> None:
        assert CURVE in await source.overview(RUN)
        compared = await source.compared(RUN)
        assert list(compared.curve.step) == list(range(1, STEPS + 1))
        assert (compared.compared.figures["bestLoss"], compared.compared.figures["loss"]) == (1.0, 3.0)
        part = await source.logs(RUN, "worker 0")
        assert part.lines[-1].endswith("last words <b>")
        assert part.place == f"{bucket}/logs/"
        with open_step_log(open_store(bucket), None, 2, rank=0) as steps:
            steps.write(StepRecord(attempt=2, step=STEPS + 1, loss=0.5, tokens=64, step_s=0.1))
        point = ResumePoint(attempt=2, resume_from=f"a000001-s{STEPS:08d}").model_dump_json(by_alias=True)
        open_store(bucket).put(attempt_key(2), point.encode())
        assert (await source.compared(RUN)).curve.step[-1] == STEPS + 1

    told(tmp_path, bucket, ask, buckets=BucketReader(os.environ, SystemClock()))


def test_a_deleted_job_is_shown_compared_and_cloned_by_what_is_in_its_bucket(bucket: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with stage(tmp_path, bucket) as made, asyncio.timeout(STORY_S):
            for name, seed in (("far", 1), ("near", 2)):
                job = job_of("team", name, seed=seed)
                await made.add(dict(job))
                write_run(write_record(bucket, job, f"u-{name}"))
            assert "Deleted</span>" not in await made.get("/")
            assert await made.post("/runs/team/far/actions/delete", status=303) == "/"
            assert "Deleted</span>" in await made.get("/")
            page = await made.get("/runs/team/far")
            assert f"{bucket}/team/far/runs/u-far.json" in page
            assert CURVE in page
            assert "/actions/" not in page
            compared = await made.get("/compare?run=team/far&run=team/near")
            assert CURVE in compared
            assert "training.seed" in compared.partition("What differs")[2]
            assert 'value="far-2"' in await made.get("/submit?from=team/far")
            assert "last words &lt;b&gt;" in await made.get("/runs/team/far/logs")

    asyncio.run(story())


def test_a_location_that_cannot_be_searched_is_a_sentence(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def said(location: str) -> list[str]:
        clock = SystemClock()
        return list((await PastRecords([location], BucketReader(os.environ, clock), clock).look()).said)

    write_record(bucket, job_of("team", "far"), "u-far")
    assert asyncio.run(said(bucket)) == []
    assert "no such bucket" in asyncio.run(said("s3://other/root"))[0]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "refuses the credentials" in asyncio.run(said(bucket))[0]


def test_a_console_of_all_users_reads_no_bucket(bucket: str, tmp_path: Path) -> None:
    write_run(bucket)

    async def ask(source: ClusterSource) -> None:
        page = await source.overview(RUN)
        assert CURVE not in page
        assert "curves are not shown" not in page
        compared = await source.compared(RUN)
        assert (list(compared.curve.step), compared.said) == ([], "")
        with pytest.raises(RefusedError, match="its pods are gone"):
            await source.logs(RUN, "worker 0")

    told(tmp_path, bucket, ask, buckets=None)


def test_what_keeps_a_bucket_away_is_a_sentence_and_hides_nothing_else(
    bucket: str, bucket_server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(bucket)

    async def without(source: ClusterSource) -> None:
        assert NO_CREDENTIALS in await source.overview(RUN)
        assert (await source.compared(RUN)).said == NO_CREDENTIALS

    told(tmp_path / "a", bucket, without, buckets=BucketReader({}, SystemClock()))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")

    async def refused(source: ClusterSource) -> None:
        page = await source.overview(RUN)
        assert "Its curves are not shown: " in page
        assert "far</h1>" in page
        assert bucket_server.environment["AWS_SECRET_ACCESS_KEY"] not in page
        compared = await source.compared(RUN)
        assert compared.said
        assert compared.compared.spec

    told(tmp_path / "b", bucket, refused, buckets=BucketReader(os.environ, SystemClock()))


def test_a_bucket_that_does_not_answer_is_not_asked_for_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    patience = dataclasses.replace(PATIENCE, tries_s=0, retries_s=0)
    monkeypatch.setattr(bucket_reader, "PATIENCE", patience)
    clock = SimulatedClock()
    reader = BucketReader(os.environ, clock)

    def said(job: str) -> StoreFailedError:
        with pytest.raises(StoreFailedError) as failed:
            reader.steps(f"s3://bucket/{job}")
        return failed.value

    assert said("one") is not said("one"), "a bucket that refuses at once is asked again"
    clock.each_look_s = bucket_reader.WAITED_S
    first = said("one")
    assert said("two") is first
    clock.now += bucket_reader.AWAY_S
    assert said("two") is not first


class SimulatedClock(SystemClock):
    """A clock that moves on with each look."""

    now = each_look_s = 0.0

    def steady_s(self) -> float:
        self.now += self.each_look_s
        return self.now
