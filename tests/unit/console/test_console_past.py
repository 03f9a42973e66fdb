"""Deleted jobs in the console of a cluster: by their records, which are searched for below named locations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from polyreme.console.commands import Commands
from polyreme.console.pages.runs import differing_fields
from polyreme.console.run_source import ALL_NAMESPACES, RunList, RunName, RunQuery
from polyreme.plugin.console import past_records
from polyreme.plugin.console.bucket_reader import NO_CREDENTIALS, BucketReader
from polyreme.plugin.console.past_records import DELETED, PastRecords, location_urls
from polyreme.plugin.console.past_source import SourceWithPast
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError
from polyreme_datahub.local_objects import LocalObjectStore
from polyreme_datahub.objects import open_store
from polyreme_system.clock import SystemClock
from tests.contract.bucket_run import STEPS, write_record, write_run
from tests.contract.run_sources import STORY_S, job_of, reach_embedded_cluster

GONE = RunName(namespace="default", name="gone")
Ask = Callable[[SourceWithPast], Awaitable[None]]


@pytest.fixture
def location(tmp_path: Path) -> str:
    return (tmp_path / "checkpoints").as_uri()


class SteadyClock(SystemClock):
    """A clock that a test moves."""

    now = 0.0

    def steady_s(self) -> float:
        return self.now


def records_at(*locations: str, clock: SystemClock | None = None) -> PastRecords:
    clock = clock or SystemClock()
    return PastRecords(locations, BucketReader({}, clock, locations), clock)


def names_and_words(past: PastRecords) -> tuple[list[str], str]:
    """Return the jobs that a search finds, and what it says."""

    async def story() -> tuple[list[str], str]:
        found = await past.look()
        assert found.searched
        return sorted(run.whole for run in found.jobs), "\n".join(found.said)

    return asyncio.run(story())


def asked(folder: Path, location: str, ask: Ask, *live: str) -> None:
    """Ask the source of a cluster that has some jobs, and the records of others below a location."""

    async def story() -> None:
        clock = SystemClock()
        buckets = BucketReader({}, clock, [location])
        past = PastRecords([location], buckets, clock)
        async with reach_embedded_cluster() as reach, asyncio.timeout(STORY_S):
            for name in live:
                await reach.cluster.create(job_of("default", name))
            commands = Commands(folder, clock)
            await ask(SourceWithPast(reach, commands, clock, namespace="default", buckets=buckets, past=past))

    asyncio.run(story())


def shown(found: RunList) -> list[tuple[str, str]]:
    return [(row.run.whole, row.state) for row in found.rows]


def test_deleted_jobs_are_listed_beside_those_that_are_there(location: str, tmp_path: Path) -> None:
    write_record(location, job_of("default", "gone", seed=1), "u-1", at_s=1.0)
    write_record(location, job_of("default", "gone", seed=2), "u-2", at_s=2.0)
    write_record(location, job_of("default", "live", seed=9), "u-3")
    write_record(location, job_of("team", "other"), "u-4")

    async def ask(source: SourceWithPast) -> None:
        own = await source.find(RunQuery(sort="name", descending=False))
        assert shown(own) == [("default/gone", DELETED), ("default/live", "New")]
        assert own.states == {DELETED: 1, "New": 1}
        assert own.rows[0].fields["training.seed"] == 2, "the newest of a name"
        assert differing_fields([row.fields for row in own.rows]) == ["training.seed"]
        assert shown(await source.find(RunQuery(namespace="team"))) == [("team/other", DELETED)]
        everywhere = await source.find(RunQuery(namespace=ALL_NAMESPACES, state=DELETED))
        assert {name for name, _ in shown(everywhere)} == {"default/gone", "team/other"}
        assert shown(await source.find(RunQuery(where=(("training.seed", "2"),)))) == [("default/gone", DELETED)]
        assert DELETED in source.states

    asked(tmp_path, location, ask, "live")


def test_a_deleted_job_is_shown_compared_and_cloned(location: str, tmp_path: Path) -> None:
    write_record(location, job_of("default", "gone", seed=1), "u-1", at_s=1.0)
    write_run(write_record(location, job_of("default", "gone", seed=2), "u-2", at_s=2.0))
    write_record(location, job_of("default", "live", seed=9), "u-3")

    async def ask(source: SourceWithPast) -> None:
        page = await source.overview(GONE)
        assert page.count("<h1") == 1
        for words in (
            "https://10.96.0.1:443",
            "sample/digits-1 v2&lt;b&gt;",
            "dp2",
            "loss over step of gone",
            "runs/u-2.json",
        ):
            assert words in page
        assert "training.seed=1" in page.partition("Earlier jobs of this name")[2]
        assert await source.offers(GONE) == ()
        compared = await source.compared(GONE)
        assert (compared.compared.spec["spec.training.seed"], compared.compared.figures["bestLoss"]) == (2, 1.0)
        assert list(compared.curve.step) == list(range(1, STEPS + 1))
        part = await source.logs(GONE, "")
        assert (part.chosen, part.lines[-1]) == ("rank 0, attempt 1", "last words <b>")
        with pytest.raises(RefusedError):
            await source.logs(GONE, "rank 7, attempt 1")
        manifest = await source.manifest(GONE)
        assert (await source.check(manifest)).good
        assert (await source.submit(manifest)) == GONE
        live = await source.overview(GONE)
        assert "Delete" not in live.partition("<h1")[0]
        assert "runs/u-2.json" in live.partition("Earlier jobs of this name")[2], "the job that has the name now is new"
        assert await source.offers(GONE)

    asked(tmp_path, location, ask, "live")


def test_a_job_without_a_record_is_not_found(location: str, tmp_path: Path) -> None:
    async def ask(source: SourceWithPast) -> None:
        for call in (source.overview, source.manifest, source.compared, source.offers):
            with pytest.raises(NotFoundError, match="did you mean"):
                await call(RunName(namespace="default", name="lvie"))
        with pytest.raises(NotFoundError):
            await source.act(GONE, "delete", None)

    write_record(location, job_of("team", "other"), "u-1")
    asked(tmp_path, location, ask, "live")


@pytest.mark.parametrize("below", ["", "/team", "/team/gone"])
def test_a_location_is_a_root_of_the_operator_of_a_namespace_or_of_a_job(location: str, below: str) -> None:
    write_record(location, job_of("team", "gone"), "u-1")
    assert names_and_words(records_at(location + below)) == (["team/gone"], "")


def test_a_search_costs_a_listing_for_each_job_and_walks_through_no_checkpoint(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        root = write_record(location, job_of("team", name), f"u-{name}")
        open_store(root).put("checkpoints/a000001-s00000001/shard", b"1")
    listed, children = list[str](), LocalObjectStore.children

    def counted(store: LocalObjectStore, folder: str) -> object:
        listed.append(folder)
        return children(store, folder)

    monkeypatch.setattr(LocalObjectStore, "children", counted)
    monkeypatch.setattr(LocalObjectStore, "list", None)
    assert len(names_and_words(records_at(location))[0]) == 3
    assert sorted(listed) == ["", "team", "team/a/runs", "team/b/runs", "team/c/runs"]


def test_what_keeps_a_record_away_is_a_sentence_and_hides_no_other(location: str, tmp_path: Path) -> None:
    root = open_store(write_record(location, job_of("team", "good"), "u-1"))
    for key, content in (
        ("runs/u-2.json", b"{"),
        ("runs/u-3.json", root.get("runs/u-1.json")),
        ("runs/u-4.json", b" " * (past_records.RECORD_BYTES_MAX + 1)),
        ("runs/u-5.json", root.get("runs/u-1.json").replace(b'"good"', b'"<b>"').replace(b"u-1", b"u-5")),
    ):
        root.put(key, content)
    (tmp_path / "file").write_text("no folder")
    file, bucket = (tmp_path / "file").as_uri(), "s3://bucket/checkpoints"
    names, said = names_and_words(records_at(file, bucket, location))
    assert names == ["team/good"]
    assert "Not a directory" in said
    assert NO_CREDENTIALS in said
    assert "u-2.json is left out: it is damaged" in said
    assert "1 more sentences like the last one" in said
    _, said = names_and_words(records_at((tmp_path / "none").as_uri()))
    assert said.startswith("no record of a job is below file:")


def test_what_is_read_and_looked_into_has_a_maximum(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        write_record(location, job_of("team", name), f"u-{name}")
    monkeypatch.setattr(past_records, "RECORDS_MAX", 2)
    monkeypatch.setattr(past_records, "REQUESTS_MAX", 1)
    names, said = names_and_words(records_at(location))
    assert (len(names), "more than 2 records" in said) == (2, True)
    monkeypatch.setattr(past_records, "FOLDERS_MAX", 1)
    names, said = names_and_words(records_at(location))
    assert (len(names), "the first 1 are looked into" in said) == (1, True)


def test_a_record_is_read_once_and_a_location_is_searched_again_after_a_while(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, get = list[str](), LocalObjectStore.get

    def counted(store: LocalObjectStore, key: str) -> bytes:
        read.append(key)
        return get(store, key)

    async def names(past: PastRecords) -> list[str]:
        await past.look()
        assert past._task is not None
        await past._task
        return sorted(run.name for run in (await past.look()).jobs)

    async def story() -> None:
        clock = SteadyClock()
        past = records_at(location, f"{location}/team", clock=clock)
        assert await names(past) == ["a"]
        open_store(location).delete("team/a/runs/u-a.json")
        write_record(location, job_of("team", "b"), "u-b")
        write_record(location, job_of("team", "c"), "u-c")
        assert await names(past) == ["a"]
        clock.now += past_records.REFRESH_S
        assert await names(past) == ["b", "c"]
        clock.now += past_records.REFRESH_S
        assert await names(past) == ["b", "c"]
        assert sorted(read) == ["team/a/runs/u-a.json", "team/b/runs/u-b.json", "team/c/runs/u-c.json"]

    write_record(location, job_of("team", "a"), "u-a")
    monkeypatch.setattr(LocalObjectStore, "get", counted)
    asyncio.run(story())


@pytest.mark.parametrize("typed", [["http://bucket/x"], [""], ["s3://me:secret@bucket/x"], ["a"] * 9])
def test_a_location_that_is_none_is_refused_at_the_start(typed: list[str]) -> None:
    with pytest.raises(InvalidConfigError, match=r"--past|expected|credentials") as refused:
        location_urls(typed)
    assert "secret" not in str(refused.value)


def test_locations_are_urls_or_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert location_urls(["s3://bucket/x/", "../x", "s3://bucket/x"]) == [
        "s3://bucket/x",
        (tmp_path.parent / "x").as_uri(),
    ]
