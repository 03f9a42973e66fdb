"""Pages that stay open: they say when their console does not answer or is silent, and continue after it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.browser.chromium import LOST, Window, console_of
from tests.contract.run_sources import job_of

SILENT_MS = 46_000
AWAY, ENDED = "The console does not answer", "This session has ended"
Driver = tuple[Any, str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A home with one run, which was not trained."""
    add_run(tmp_path, "first")
    return tmp_path


def add_run(home: Path, name: str) -> None:
    run = home / "runs/default" / name
    run.mkdir(parents=True)
    (run / "job.yaml").write_text(yaml.safe_dump(job_of("default", name)))
    (run / "run.json").write_text(json.dumps({"namespace": "default", "name": name, "uid": name}))
    (run / "state.json").write_text(json.dumps({"state": "Succeeded", "finished": True, "step": 10, "steps": 10}))


def opened(driver: Driver, link: str) -> Window:
    """Open a page of a console by its link, and wait until its live part is connected."""
    browser, axe, expect = driver
    window = Window(browser, axe, expect, origin=link.partition("/start")[0])
    window.refused_is_expected = True
    window.page.clock.install()
    with window.page.expect_response("**/live/runs"):
        window.page.goto(link)
    window.sees("table.runs td.name", "first")
    return window


def test_an_open_page_says_that_its_console_was_killed_and_continues_with_the_next(
    driver: Driver, folder: Path
) -> None:
    """A new console has new sessions: its link, opened in another tab, is the open page's too."""
    with console_of(folder) as first:
        window = opened(driver, first.link)
        window.mark()
        window.expect(window.page.locator(LOST)).to_be_empty()
        first.send(signal.SIGKILL)
        window.sees(LOST, AWAY)
        window.examine()
    add_run(folder, "second")
    with console_of(folder, port=int(first.origin.rpartition(":")[2])) as second:
        window.sees(LOST, ENDED)
        window.context.new_page().goto(second.link)
        window.sees("table.runs td.name", "second")
        window.expect(window.page.locator(LOST)).to_be_empty()
    window.is_not_reloaded()
    window.close()
    assert window.faults == []


def test_an_open_page_says_that_an_open_connection_is_silent(driver: Driver, folder: Path) -> None:
    with console_of(folder) as console:
        window = opened(driver, console.link)
        console.send(signal.SIGSTOP)
        try:
            window.expect(window.page.locator(LOST)).to_be_empty()
            window.page.clock.fast_forward(SILENT_MS)
            window.sees(LOST, AWAY)
        finally:
            console.send(signal.SIGCONT)
        add_run(folder, "second")
        window.sees("table.runs td.name", "second")
        window.expect(window.page.locator(LOST)).to_be_empty()
        window.close()
    assert window.faults == []


@pytest.mark.parametrize(("status", "words"), [(503, "answers with 503"), (0, AWAY)], ids=["refused", "away"])
def test_a_page_whose_first_request_fails_keeps_its_content_and_asks_again(
    driver: Driver, folder: Path, status: int, words: str
) -> None:
    with console_of(folder) as console:
        window = opened(driver, console.link)
        fail = (lambda route: route.fulfill(status=status, body="no")) if status else (lambda route: route.abort())
        window.page.route("**/live/**", fail)
        window.go("/")
        window.sees(LOST, words)
        window.sees("table.runs td.name", "first")
        window.page.unroute("**/live/**")
        add_run(folder, "second")
        window.sees("table.runs td.name", "second")
        window.expect(window.page.locator(LOST)).to_be_empty()
        window.close()
    assert window.faults == []
