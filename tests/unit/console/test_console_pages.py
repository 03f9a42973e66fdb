"""Pages of the console on a kept home: what they show, and what they say of damaged and hostile files."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from polyreme.console.home import run_reader
from polyreme.console.live import ALIVE
from polyreme.run_files.records import StepBytes
from tests.contract.run_sources import job_of
from tests.kept.folders import FINISHED, STOPPED, VERSIONS, copy_home
from tests.unit.console.console_browser import Browser, with_browser

BOTH = f"/compare?run=default/{FINISHED}&run=default/{STOPPED}"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A finished run, and one that was stopped after a rank was killed."""
    return copy_home(VERSIONS[0], tmp_path)


@with_browser
async def test_runs_are_listed_with_what_differs(browser: Browser) -> None:
    page = await browser.get("/")
    assert page.count("<h1") == 1
    assert f'href="/runs/default/{FINISHED}"' in page
    assert 'title="training.steps"' in page
    assert 'title="training.seed"' not in page
    only = await browser.get("/?where=training.steps%3D2")
    assert FINISHED in only
    assert f"/runs/default/{STOPPED}" not in only
    assert "like that" in await browser.get("/?text=other")
    up = await browser.get("/?sort=training.steps&order=up")
    assert up.index(f"/runs/default/{FINISHED}") < up.index(f"/runs/default/{STOPPED}")


@with_browser
async def test_a_run_shows_its_report_and_the_commands_of_its_actions(browser: Browser, home: Path) -> None:
    page = await browser.get(f"/runs/default/{STOPPED}")
    assert page.count("<h1") == 1
    assert "<polyline" in page
    assert f"polyreme runs rm {STOPPED} --yes" in page
    assert "runs stop" not in page
    state = json.loads((home / "runs/default" / STOPPED / "state.json").read_text())
    state["status"].pop("conditions", None)
    (home / "runs/default" / STOPPED / "state.json").write_text(json.dumps(state | {"state": "Starting"}))
    killed = await browser.get(f"/runs/default/{STOPPED}")
    assert "badge Stopped" in killed, "its process is gone, whatever it wrote last"
    assert "&quot;open&quot;" in killed, "what is unfolded stays so while the page follows the run"
    assert "did you mean" in await browser.get("/runs/default/finishd", status=404)


@with_browser
async def test_a_comparison_shows_fields_curves_and_figures(browser: Browser) -> None:
    page = await browser.get(BOTH)
    assert "training.optimizer.name" in page
    assert page.count("<polyline") == 4
    assert "gradient norm over tokens" in await browser.get(f"{BOTH}&measure=gradient+norm&over=tokens")
    assert "was deleted" in await browser.get(f"{BOTH}&run=default/gone")
    assert "Choose two runs" in await browser.get("/compare")


@with_browser
async def test_a_job_with_more_fields_than_are_kept_is_said_on_the_page(browser: Browser, home: Path) -> None:
    assert "more than 2,000 fields" not in await browser.get("/")
    file = home / "runs/default" / STOPPED / "job.yaml"
    job = yaml.safe_load(file.read_text())
    job["spec"]["data"]["sources"] = [{"name": f"n{at}", "dataset": "one"} for at in range(1000)]
    file.write_text(yaml.safe_dump(job))
    await asyncio.to_thread(browser.source.index.refresh)
    page = await browser.get("/")
    assert "Of a job with more than 2,000 fields, the first 2,000 are shown and found." in page


@with_browser
async def test_the_last_axis_of_a_comparison_is_the_held_out_loss_if_all_runs_have_one(
    browser: Browser, home: Path
) -> None:
    both = await browser.get(BOTH)
    assert re.search(r'<th scope="row">best held out</th><td>5\.7209</td><td>5\.6548</td>', both)
    assert "<h2>Fields and best held-out loss</h2>" in both
    assert ">best held-out loss</text>" in both
    without = home / "runs/default/without"
    without.mkdir()
    (without / "job.yaml").write_text(yaml.safe_dump(job_of("default", "without")))
    (without / "run.json").write_text(json.dumps({"namespace": "default", "name": "without", "uid": "without"}))
    assert "<h2>Fields and best training loss</h2>" in await browser.get(f"{BOTH}&run=default/without")


@with_browser
async def test_a_part_is_sent_when_it_changes(browser: Browser, home: Path) -> None:
    headers = {"Cookie": browser.cookie}
    async with browser.session.get(f"{browser.origin}/live/runs", headers=headers) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        first = (await response.content.readuntil(b"\n\n")).decode()
        assert first.startswith("id: ")
        shutil.rmtree(home / "runs/default" / STOPPED)
        await asyncio.to_thread(browser.source.index.refresh)
        second = (await response.content.readuntil(b"\n\n")).decode()
        assert STOPPED in first
        assert STOPPED not in second
    headers["Last-Event-ID"] = second.partition("\n")[0].removeprefix("id: ")
    async with browser.session.get(f"{browser.origin}/live/runs", headers=headers) as response:
        assert await response.content.readuntil(b"\n\n") == ALIVE, "a page that has all hears at once that it is live"


@with_browser
async def test_names_and_lines_of_others_are_text(browser: Browser, home: Path) -> None:
    run = home / "runs/default" / STOPPED
    state = json.loads((run / "state.json").read_text()) | {"message": HOSTILE, "state": HOSTILE}
    (run / "state.json").write_text(json.dumps(state))
    (run / "pods" / "p").mkdir(parents=True)
    (run / "pods" / "p" / "rank-0.a9.log").write_text(f"{HOSTILE}\n" + "x" * 10_000_000 + "\nlast\n")
    await asyncio.to_thread(browser.source.index.refresh)
    for path in ("/", f"/runs/default/{STOPPED}", f"/runs/default/{STOPPED}/logs", f"/?text={HOSTILE}&state={HOSTILE}"):
        page = await browser.get(path)
        assert "<img" not in page
        assert len(page) < 400_000
    assert "last" in await browser.get(f"/runs/default/{STOPPED}/logs?file=rank+0,+attempt+9")
    assert "<img" not in await browser.get("/runs/default/%3Cimg%20src=x%3E", status=404)
    assert "passwd" not in await browser.get("/runs/default/..%2f..%2fetc", status=404)


@with_browser
async def test_a_run_whose_steps_are_too_many_lines_is_a_sentence(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reader, "STEPS_MAX", StepBytes(lines=10, columns=10))
    assert "of step records in lines, expected at most" in await browser.get(f"/runs/default/{STOPPED}")
    assert "is left out" in await browser.get(BOTH)


@pytest.mark.parametrize("gone", ["state.json", "job.yaml", "run.json", "timeline.jsonl", "checkpoints"])
@with_browser
async def test_a_run_that_is_half_deleted_is_a_sentence(browser: Browser, home: Path, gone: str) -> None:
    if gone == "checkpoints":
        shutil.rmtree(home / "checkpoints/default" / STOPPED)
    else:
        (home / "runs/default" / STOPPED / gone).unlink()
    await asyncio.to_thread(browser.source.index.refresh)
    assert STOPPED in await browser.get("/")
    assert STOPPED in await browser.get(f"/runs/default/{STOPPED}")
    assert STOPPED in await browser.get(BOTH)
    assert STOPPED in await browser.get(f"/runs/default/{STOPPED}/logs")


@pytest.mark.parametrize("damage", ["state.json", "job.yaml", "run.json"])
@with_browser
async def test_a_damaged_file_is_a_sentence(browser: Browser, home: Path, damage: str) -> None:
    (home / "runs/default" / STOPPED / damage).write_text('{"state": [}\x00')
    await asyncio.to_thread(browser.source.index.refresh)
    assert STOPPED in await browser.get("/")
    assert STOPPED in await browser.get(f"/runs/default/{STOPPED}")
    assert STOPPED in await browser.get(BOTH)


@with_browser
async def test_this_machine_and_its_data_are_shown(browser: Browser) -> None:
    assert "polyreme doctor" in await browser.get("/machine")
    assert "sample/digits-1" in await browser.get("/data")
    assert "sample/digits-1@1" in await browser.get("/data?dataset=sample/digits-1")
    assert "no dataset" in await browser.get("/data?dataset=other")
    assert "expected a number" in await browser.get(f"/runs/default/{FINISHED}/preview?step=x", status=422)
    # The kept data are of an older format: they are refused by a sentence.
    assert "again with the command" in await browser.get(f"/runs/default/{FINISHED}/preview?step=1", status=422)
