"""What a controller prepares on this machine: data in the registry of a home, pinned while its job needs it."""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyreme.run_files.data import release_run
from polyreme.run_files.paths import Home
from polyreme_api import labels
from polyreme_api.data_report import DataState, data_digest, read_report
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.job import TrainingJob, parse_job
from polyreme_cluster.port import ObjectRef
from polyreme_datahub.hub import register, remove_dataset
from polyreme_datahub_service.controller import Prepared
from polyreme_datahub_service.keeper import QUICK_RECORDS_MAX, DataKeeper, is_quick
from polyreme_datahub_service.pinning import pin_versions
from polyreme_datahub_service.preparation import LocalPreparation
from polyreme_datahub_service.reporter import Reporter
from polyreme_datahub_service.worker_process import DataWork
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_system.clock import SystemClock
from polyreme_system.files import write_json
from tests.unit.operator.operator_scenes import job_manifest

PATIENCE_S = 60.0
TURNS = '[{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]'


def home_with(tmp_path: Path, lines: list[str]) -> Home:
    home = Home(path=tmp_path / "home")
    home.prepare_data()
    path = tmp_path / "pages.jsonl"
    path.write_text("\n".join(lines))
    register(home.registry_url, home.objects_url, "own/pages", str(path))
    return home


def job_on(dataset: str) -> TrainingJob:
    data = {"sources": [{"name": "a", "dataset": dataset}], "sequenceTokens": 128, "tokenizer": {"vocabulary": 304}}
    return parse_job(job_manifest(data=data))


def test_prepared_data_is_whole_and_its_versions_are_pinned_until_the_job_is_gone(tmp_path: Path) -> None:
    home, job = home_with(tmp_path, [f'{{"conversations": {TURNS}}}', "not JSON"]), job_on("own/pages")
    lines: list[Mapping[str, Any]] = []

    async def story() -> None:
        preparation = LocalPreparation(home, scope="here/*")
        made = await preparation.prepare(job, lines.append)
        assert made.message == "1 sample; 1 dead letter"
        assert made.plan.startswith("plans/")
        assert await preparation.is_whole(job)
        with pytest.raises(RefusedError, match=job.metadata.uid):
            remove_dataset(home.registry_url, home.objects_url, "own/pages")
        await preparation.forget(job.metadata.uid)
        assert remove_dataset(home.registry_url, home.objects_url, "own/pages") == ["own/pages@1"]

    asyncio.run(story())
    assert lines


class Work(DataWork):
    """Stands for the pipeline of one run."""

    def __init__(self, error: InvalidConfigError | None = None, *, blocks: int = 0) -> None:
        self.error, self.runs, self.blocks = error, 0, blocks
        self.reporter: Reporter | None = None

    async def run(self) -> None:
        self.runs += 1
        if self.blocks and self.reporter is not None:
            self.reporter.note({"stage": "tokenize", "done": 400, "total": 1000})
            self.reporter.note({"stage": "blocks", "done": self.blocks, "total": 9})
            await asyncio.sleep(60.0)
        if self.error is not None:
            raise self.error


def report_of(store: Store) -> tuple[DataState, str] | None:
    """Return what was reported last; None before that."""
    metadata = store.get(ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j"))["metadata"]
    report, _ = read_report(metadata.get("annotations") or {})
    return None if report is None else (report.state, report.message)


@pytest.mark.parametrize(
    ("work", "state", "message"),
    [
        (Work(), DataState.PROCESSED, "3 samples"),
        (Work(InvalidConfigError("no good record")), DataState.REFUSED, "no good record"),
        (Work(blocks=2), DataState.READABLE, "2 of 9 blocks can be trained on"),
    ],
)
def test_a_run_reports_on_its_own_data(tmp_path: Path, work: Work, state: DataState, message: str) -> None:
    home = Home(path=tmp_path / "home")
    home.prepare_data()
    store, clock = Store(new_uid=lambda: "u-1", now_s=lambda: 1.0), SystemClock()
    cluster = EmbeddedCluster(store)
    pinned: list[str] = []
    manifest = job_manifest()
    del manifest["metadata"]["uid"], manifest["metadata"]["resourceVersion"], manifest["status"]
    job = parse_job(store.create(manifest))
    reporter = Reporter(
        cluster,
        clock,
        ref=ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j"),
        uid=job.metadata.uid,
        about=data_digest(job.spec),
    )
    work.reporter = reporter

    def made() -> Prepared:
        pinned.append(job.metadata.uid)
        return Prepared(plan="plans/p.json", message="3 samples")

    keeper = DataKeeper(
        work,
        objects_url=home.objects_url,
        job=job,
        clock=clock,
        report=lambda _: None,
        reporter=reporter,
        made=made,
    )

    async def story() -> None:
        task = asyncio.ensure_future(keeper.run())
        # It runs on when all is reported: each report replaces the one before.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while report_of(store) != (state, message):
                    await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(story())
    assert report_of(store) == (state, message)
    assert pinned == ([job.metadata.uid] if state is DataState.PROCESSED else [])


def test_a_run_releases_its_versions_when_it_is_finished_or_deleted(tmp_path: Path) -> None:
    home = home_with(tmp_path, [f'{{"conversations": {TURNS}}}'])
    run = home.run("default", "r")
    release_run(home, run)
    write_json(run.identity_file, {"uid": "uid-r"})
    pin_versions(home.registry_url, "uid-r", ["own/pages@1"])
    with pytest.raises(RefusedError, match="uid-r"):
        remove_dataset(home.registry_url, home.objects_url, "own/pages")
    release_run(home, run)
    assert remove_dataset(home.registry_url, home.objects_url, "own/pages") == ["own/pages@1"]


async def test_pins_of_controllers_are_separate_by_scope(tmp_path: Path) -> None:
    home, job = home_with(tmp_path, [f'{{"conversations": {TURNS}}}']), job_on("own/pages")
    uid = job.metadata.uid
    mine, other = LocalPreparation(home, scope="lease-a/*"), LocalPreparation(home, scope="lease-b/*")
    await mine.prepare(job, lambda _line: None)
    pin_versions(home.registry_url, "lease-b/*/elsewhere", ["own/pages@1"])
    shutil.rmtree(home.path / "data" / "jobs")
    assert (await mine.kept(), await other.kept()) == ({uid}, {"elsewhere"})
    await mine.forget(uid)
    assert (await mine.kept(), await other.kept()) == (set(), {"elsewhere"})
    await other.forget("elsewhere")
    assert remove_dataset(home.registry_url, home.objects_url, "own/pages") == ["own/pages@1"]


def test_ranks_start_at_once_only_for_a_known_and_small_amount_of_data(tmp_path: Path) -> None:
    home = home_with(tmp_path, [f'{{"conversations": {TURNS}}}'] * (QUICK_RECORDS_MAX + 1))
    assert is_quick(home, job_on("sample/digits-1"))
    assert not is_quick(home, job_on("own/pages"))
    assert not is_quick(home, job_on("own/unknown"))
