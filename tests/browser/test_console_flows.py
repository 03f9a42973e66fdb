"""What a person does with the console: compare, submit, follow, clone, suspend, delete, and mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Console, Window
from tests.browser.conftest import FIRST, RATES, SECOND
from tests.e2e.polyreme_home import PolyremeHome

LIVE, CLONE = "live", "live-2"
HOSTILE = "<img src=x onerror=document.body.id='hit'>"
LINE_BYTES = 10_000_000


@pytest.fixture
def copied(home: PolyremeHome) -> Iterator[Path]:
    """Folder of a copy of a finished run, which a test may spoil."""
    folder = home.path / "runs/default" / "copied"
    shutil.copytree(home.path / "runs/default" / FIRST, folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_used_link_opens_no_second_session(window: Window, console: Console) -> None:
    used = console.link
    stranger = window.stranger()
    assert stranger.goto(used).status == 200
    console.next_link()
    stranger.context.clear_cookies()
    assert stranger.goto(used).status == 401
    window.expect(stranger.locator("h1")).to_have_text("No session")
    window.expect(stranger.locator("nav a")).to_have_count(0)
    window.examine(stranger)
    stranger.close()


def test_a_session_that_is_gone_is_said_on_the_page(window: Window) -> None:
    window.go("/")
    window.context.clear_cookies()
    window.refused_is_expected = True
    assert window.page.reload().status == 401
    window.expect(window.page.locator("h1")).to_have_text("No session")


def test_runs_are_filtered_and_compared(window: Window) -> None:
    window.go("/")
    rows = window.page.locator("table.runs tbody tr")
    window.page.get_by_label("Fields").fill(f"training.optimizer.learningRate={RATES[FIRST]}")
    window.press("Filter")
    window.expect(rows).to_have_count(1)
    window.sees("table.runs td.name", FIRST)
    window.page.get_by_label("Fields").fill("")
    window.press("Filter")
    for name in (FIRST, SECOND):
        window.page.get_by_role("checkbox", name=name, exact=True).check()
    window.press("Compare the chosen runs")
    window.expect(window.page.locator("h1")).to_have_text("Compare")
    window.sees("tr", "training.optimizer.learningRate")
    window.page.get_by_role("link", name="held-out loss", exact=True).click()
    window.sees("[aria-current]", "held-out loss")


@pytest.mark.parametrize("axis", ["tokens", "hours"])
def test_curves_are_compared_over_another_axis(window: Window, axis: str) -> None:
    window.go(f"/compare?run=default/{FIRST}&run=default/{SECOND}")
    window.page.get_by_role("link", name=axis, exact=True).click()
    window.sees("[aria-current]", axis)
    window.expect(window.page.locator("svg").first).to_be_visible()


def test_a_column_sorts_the_runs_both_ways(window: Window) -> None:
    window.go("/")
    seen = []
    for order in ("descending", "ascending"):
        window.page.locator("th").get_by_role("link", name=re.compile("^learningRate")).click()
        window.expect(window.page.locator(f"th[aria-sort={order}]")).to_contain_text("learningRate")
        names = window.page.locator("table.runs td.name").all_inner_texts()
        seen.append([name for name in names if name in RATES])
    assert seen == [[FIRST, SECOND], [SECOND, FIRST]]


def test_the_keyboard_alone_opens_a_run(window: Window) -> None:
    window.go("/")
    for _ in range(100):
        window.page.keyboard.press("Tab")
        if window.page.evaluate("document.activeElement.textContent") == FIRST:
            break
    window.page.keyboard.press("Enter")
    window.expect(window.page).to_have_url(f"{window.origin}/runs/default/{FIRST}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.steps", "0"),
        ("training.steps", "many"),
        ("training.optimizer.learningRate", "fast"),
        ("data.sources", "[{name: one}]"),
        ("queueName", "No_Name"),
        ("checkpoint.keepBest", "1"),
    ],
    ids=["below its bound", "no integer", "no decimal", "a list without a field", "no name", "a rule of two fields"],
)
def test_a_mistake_is_shown_with_its_field(window: Window, path: str, value: str) -> None:
    window.go(f"/submit?from=default/{FIRST}")
    window.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    window.field(path).fill(value)
    window.press("Check")
    window.sees("#result .notice.bad", path.removeprefix("spec."))
    window.expect(window.page).to_have_url(re.compile("/submit"))


def test_yaml_that_is_none_is_refused_with_its_line(window: Window) -> None:
    window.go("/submit")
    window.page.locator("summary").filter(has_text="Start from YAML").click()
    window.page.get_by_label("A TrainingJob").fill("kind: [")
    window.refused_is_expected = True
    window.press("Use this YAML")
    window.sees("main", "line")


def test_a_name_is_text_wherever_it_is_shown(window: Window, home: PolyremeHome) -> None:
    folder = home.path / "runs/default" / HOSTILE
    shutil.copytree(home.path / "runs/default" / FIRST, folder)
    try:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"state": HOSTILE, "message": HOSTILE}))
        window.go("/")
        window.sees("table.runs td.name", HOSTILE)
        for path in ("/", f"/?text={HOSTILE}", f"/compare?run=default/{HOSTILE}&run=default/{FIRST}", "/submit"):
            window.go(path)
            window.sees("main", HOSTILE)
            window.expect(window.page.locator("img")).to_have_count(0)
            assert window.page.evaluate("document.body.id") != "hit"
    finally:
        shutil.rmtree(folder)


def test_a_line_of_ten_megabytes_is_cut(window: Window, copied: Path) -> None:
    (log,) = copied.glob("pods/*/rank-0.a1.log")
    with log.open("a") as file:
        file.write("x" * LINE_BYTES + "\nthe last line\n")
    response = window.go("/runs/default/copied/logs")
    assert len(response.body()) < LINE_BYTES / 10
    window.sees("pre.log", "the last line")


def test_a_run_whose_files_are_gone_says_so(window: Window, copied: Path) -> None:
    window.go("/runs/default/copied")
    window.sees(".badge", "Succeeded")
    shutil.rmtree(copied / "pods")
    (copied / "job.yaml").write_text("kind: [")
    window.go("/runs/default/copied")
    window.sees("main .notice.bad", "not YAML")
    window.go("/")
    window.sees("table.runs td.name", "copied")


def test_a_job_is_submitted_followed_cloned_restarted_suspended_and_deleted(window: Window, home: PolyremeHome) -> None:
    """The clone loses its rank and is seen to come back as a second attempt."""
    window.go(f"/submit?from=default/{FIRST}")
    window.field("metadata.name").fill(LIVE)
    window.field("training.steps").fill("40")
    window.press("Check")
    window.sees("#result .notice", "The job is accepted.")
    window.examine()
    for part in ("Check", "Plan", "YAML"):
        window.expect(window.page.locator("#result").get_by_role("heading", name=part, exact=True)).to_be_visible()
    window.press("Submit")
    window.expect(window.page).to_have_url(f"{window.origin}/runs/default/{LIVE}")
    window.mark()
    window.sees(".actions summary", "Suspend")
    window.sees(".badge", "Succeeded")
    window.is_not_reloaded()
    window.page.get_by_role("link", name="Clone with changes").click()
    window.expect(window.field("metadata.name")).to_have_value(CLONE)
    window.field("training.steps").fill("100000")
    window.press("Check")
    window.sees("#result", "Changed: training.steps=100000")
    window.press("Submit")
    window.sees(".badge", "Running")
    window.mark()
    (processes,) = (home.path / "runs/default" / CLONE).glob("pods/*/processes.json")
    os.kill(json.loads(processes.read_text())["ranks"]["0"], signal.SIGKILL)
    window.sees("main", re.compile(r"attempt\s*2", re.IGNORECASE))
    window.is_not_reloaded()
    window.act("Suspend")
    window.sees(".actions summary", "Resume")
    window.sees(".badge", "Stopped")
    window.act("Delete")
    window.expect(window.page).to_have_url(f"{window.origin}/")
    window.expect(window.page.get_by_role("checkbox", name=CLONE, exact=True)).to_have_count(0)
