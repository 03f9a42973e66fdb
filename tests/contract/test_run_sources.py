"""RunSource: lists, one run, its logs and actions, comparison, check and submission, alike of a home and a cluster."""

import contextlib
import functools
from pathlib import Path

import pytest

from polyreme.console.run_source import ALL_NAMESPACES, RunList, RunName, RunQuery
from polyreme_api.errors import NotFoundError, PolyremeError, RefusedError
from tests.contract.run_sources import RUN_SOURCES, RunHarness, RunOpener, job_of, run_story

pytestmark = pytest.mark.parametrize("opener", RUN_SOURCES.values(), ids=RUN_SOURCES.keys())


def names(found: RunList) -> list[str]:
    return [row.name for row in found.rows]


def test_runs_are_filtered_sorted_and_cut_into_pages(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        for name, seed, some in (
            ("story-a", 3, {"capacityFactor": "1.5"}),
            ("story-b", 20, {"capacityFactor": "1.25"}),
            ("story-c", 1, {}),
        ):
            await harness.add(job_of(harness.own, name, seed=seed, **some))
        await harness.add(job_of(harness.other, "story-d", seed=7))
        await harness.settle()
        find, own = harness.source.find, harness.own
        up = RunQuery(namespace=own, sort="training.seed", descending=False)
        assert names(await find(up)) == ["story-c", "story-a", "story-b"]
        assert names(await find(RunQuery(namespace=own, sort="training.seed"))) == ["story-b", "story-a", "story-c"]
        second = await find(RunQuery(namespace=own, sort="name", descending=False, offset=1, count=1))
        assert (names(second), second.total, sum(second.states.values())) == (["story-b"], 3, 3)
        assert names(await find(RunQuery(namespace=own, text="Y-B"))) == ["story-b"]
        assert names(await find(RunQuery(namespace=own, where=(("training.seed", "3"),)))) == ["story-a"]
        for typed in ("1.50", "1.5"):
            assert names(await find(RunQuery(namespace=own, where=(("training.capacityFactor", typed),)))) == [
                "story-a"
            ]
        for descending, ordered in ((False, ["story-b", "story-a"]), (True, ["story-a", "story-b"])):
            by = functools.partial(RunQuery, namespace=own, sort="training.capacityFactor", descending=descending)
            pages = [names(await find(by(offset=offset, count=2))) for offset in (0, 1, 2)]
            assert pages == [ordered, [ordered[1], "story-c"], ["story-c"]], "a run without the field is the last"
        assert names(await find(RunQuery(namespace=harness.other))) == ["story-d"]
        everywhere = await find(RunQuery(namespace=ALL_NAMESPACES, text="story-"))
        assert sorted(names(everywhere)) == ["story-a", "story-b", "story-c", "story-d"]
        row = second.rows[0]
        assert names(await find(RunQuery(namespace=own, state=row.state, text="story-b"))) == ["story-b"]
        assert names(await find(RunQuery(namespace=own, state="Other"))) == []
        assert row.fields["training.seed"] == 20

    run_story(opener, tmp_path, story)


def test_a_run_is_shown_with_its_job_and_actions(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        await harness.add(job_of(harness.own, "first", seed=3))
        await harness.settle()
        run = RunName(namespace=harness.own, name="first")
        page = await harness.source.overview(run)
        assert page.count("<h1") == 1
        assert "first" in page.partition("<h1")[2].partition("</h1>")[0]
        assert (await harness.source.manifest(run))["spec"]["training"]["seed"] == 3
        offers = await harness.source.offers(run)
        assert {"delete"} <= {offer.name for offer in offers}
        assert all("first" in offer.command for offer in offers)
        compared = await harness.source.compared(run)
        assert compared.compared.spec["spec.training.seed"] == 3

    run_story(opener, tmp_path, story)


def test_a_run_that_is_not_there_is_not_found(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        await harness.add(job_of(harness.own, "first"))
        await harness.settle()
        source, gone = harness.source, RunName(namespace=harness.own, name="frist")
        for asked in (source.overview, source.manifest, source.compared):
            with pytest.raises(NotFoundError):
                await asked(gone)
        with pytest.raises(NotFoundError):
            await source.act(gone, "delete", None)
        with pytest.raises(NotFoundError):
            await source.act(RunName(namespace=harness.own, name="first"), "other", None)

    run_story(opener, tmp_path, story)


def test_lines_that_are_not_there_are_a_refusal(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        await harness.add(job_of(harness.own, "first"))
        run = RunName(namespace=harness.own, name="first")
        for name in ("", "worker 999", "../../etc/passwd"):
            with pytest.raises(RefusedError):
                await harness.source.logs(run, name)

    run_story(opener, tmp_path, story)


def test_a_job_is_checked_without_being_submitted(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        good = await harness.source.check(job_of(harness.own, "first"))
        assert good.good, good.said
        assert [row for row in ("layout", "step", "memory per rank") if f"\n{row} " not in good.plan] == []
        bad = await harness.source.check(job_of(harness.own, "first", steps=0))
        assert not bad.good
        assert "spec.training.steps" in bad.said
        await harness.settle()
        assert not (await harness.source.find(RunQuery(namespace=harness.own))).rows
        assert "training.steps=3" in harness.source.submit_command(["training.steps=3"])

    run_story(opener, tmp_path, story)


def test_a_wrong_job_or_a_taken_name_is_not_submitted(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        await harness.add(job_of(harness.own, "first"))
        with pytest.raises(RefusedError, match="exists"):
            await harness.source.submit(job_of(harness.own, "first"))
        with pytest.raises(PolyremeError, match=r"spec\.training\.steps"):
            await harness.source.submit(job_of(harness.own, "second", steps=0))
        await harness.settle()
        assert names(await harness.source.find(RunQuery(namespace=harness.own))) == ["first"]

    run_story(opener, tmp_path, story)


def test_a_deleted_run_is_gone(opener: RunOpener, tmp_path: Path) -> None:
    async def story(harness: RunHarness) -> None:
        await harness.add(job_of(harness.own, "first"))
        run = RunName(namespace=harness.own, name="first")
        await harness.source.act(run, "delete", None)
        await harness.settle()
        assert not (await harness.source.find(RunQuery(namespace=harness.own))).rows
        with contextlib.suppress(NotFoundError):
            assert "runs rm" in await harness.source.overview(run), "a home shows the command that has ended"

    run_story(opener, tmp_path, story)
