"""Submission by the form: what is changed becomes settings, the command checks it, and nothing else is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from polyreme.console.assets import static_text
from polyreme.console.commands import Commands
from polyreme.console.home.actions import submitted_job
from polyreme.console.job_form import PREFIX, changed, job_fields, read_base, settings_of, value_text
from polyreme.job_files import read_job
from polyreme.run_files.paths import Home
from polyreme_api.errors import InvalidConfigError
from tests.kept.folders import FINISHED, STOPPED, VERSIONS, copy_home
from tests.unit.console.console_browser import Browser, with_browser

BASE = static_text("example.yaml")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A finished run, and one that was stopped."""
    return copy_home(VERSIONS[0], tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of commands that were started: none is."""
    calls: list[list[str]] = []
    monkeypatch.setattr(Commands, "start", lambda _, arguments, **__: calls.append(list(arguments)))
    return calls


def form_of(text: str, **typed: str) -> dict[str, str]:
    """Return what a browser sends of a form in which some fields were changed."""
    base = read_base(text)
    fields = {PREFIX + field.path: value_text(base, field) for field in job_fields()}
    named = {PREFIX + path.replace("__", "."): value for path, value in typed.items()}
    return {"base": text, PREFIX + "metadata.name": base["metadata"]["name"], **fields, **named}


def test_fields_of_the_form_are_those_of_the_definition() -> None:
    paths = {field.path: field for field in job_fields()}
    assert paths["training.optimizer.learningRate"].kind == "string"
    assert (paths["training.steps"].kind, paths["training.steps"].least) == ("integer", 1)
    assert paths["data.sources"].kind == "yaml"
    assert "bfloat16" in paths["training.precision"].choices
    assert not [path for path in paths if path.startswith("workers.template")]
    assert all(field.says for field in paths.values() if field.group == "training")


def test_a_form_that_was_not_changed_is_its_base() -> None:
    assert settings_of(read_base(BASE), form_of(BASE)) == []


def test_changes_of_the_form_are_settings() -> None:
    form = form_of(
        BASE,
        training__steps="30",
        training__seed="",
        training__optimizer__learningRate="3e-4",
        data__sources="[{name: one, dataset: sample/digits-2}]",
        training__tf32="true",
        metadata__name="other",
    )
    base = read_base(BASE)
    settings = settings_of(base, form)
    assert "training.seed=null" in settings
    spec = changed(base, settings)["spec"]
    assert (spec["training"]["steps"], spec["training"]["tf32"]) == (30, True)
    assert spec["training"]["optimizer"]["learningRate"] == "3e-4"
    assert spec["data"]["sources"] == [{"name": "one", "dataset": "sample/digits-2"}]
    assert "seed" not in spec["training"]
    assert changed(base, settings)["metadata"]["name"] == "other"


@pytest.mark.parametrize("text", ["", "a: [", "spec: 1", "{}\n---\n{}", "[1]", "&a [*a]"])
def test_yaml_that_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        read_base(text)


def test_the_example_is_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(BASE)
    assert read_job(tmp_path / "job.yaml").metadata.name == "first"


@with_browser
async def test_a_job_is_checked_and_submitted(browser: Browser, home: Path, started: list[list[str]]) -> None:
    assert 'name="set:training.steps"' in await browser.get("/submit")
    assert f'value="{STOPPED}-2"' in await browser.get(f"/submit?from=default/{STOPPED}")
    await browser.get("/submit?from=../../etc/passwd", status=404)
    wrong = await browser.post("/submit/check", status=200, **form_of(BASE, training__steps="0"))
    assert "spec.training.steps" in wrong
    refused = await browser.post("/submit/check", status=200, **form_of(BASE, model__preset="none"))
    checked = await browser.post("/submit/check", status=200, **form_of(BASE))
    for result in (refused, checked):
        assert re.findall("<h2>(.*?)</h2>", result) == ["Check", "Plan", "YAML"]
    assert "There is none" in refused
    assert re.search(r"\nstep +[0-9.]+ s, estimated\n", checked)
    assert not started
    submitted = await browser.post("/submit", status=303, **form_of(BASE, training__steps="30"))
    assert submitted == "/runs/default/first"
    file = submitted_job(Home(path=home).run("default", "first"))
    assert started == [["run", str(file)]]
    assert yaml.safe_load(file.read_text())["spec"]["training"]["steps"] == 30
    taken = await browser.post("/submit", status=422, **form_of(BASE, metadata__name=FINISHED))
    assert "exists" in taken


@with_browser
async def test_actions_are_commands(browser: Browser, home: Path, started: list[list[str]]) -> None:
    own = f"/runs/default/{STOPPED}"
    assert await browser.post(f"{own}/actions/resume", status=303) == own
    assert await browser.post(f"{own}/actions/delete", status=303) == "/"
    assert started == [["run", str(home / "runs/default" / STOPPED / "job.yaml")], ["runs", "rm", STOPPED, "--yes"]]
    assert "not being served" in await browser.post(f"{own}/actions/stop", status=422)
    await browser.post(f"{own}/actions/other", status=404)
    await browser.post("/runs/default/gone/actions/delete", status=404)


@with_browser
async def test_a_command_that_fails_is_shown_with_its_output(browser: Browser, home: Path) -> None:
    del home
    made = browser.source.commands
    made.start(["runs", "rm", "gone", "--yes"], subject=f"default/{STOPPED}")
    await made.ended()
    page = await browser.get(f"/runs/default/{STOPPED}")
    assert re.search("runs rm gone --yes</code> ended with code 3", page)
    assert "no run &#x27;gone&#x27;" in page
