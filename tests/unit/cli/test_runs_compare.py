"""``polyreme runs compare`` on runs that an earlier version left: differences of the specs, and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.main import invoke
from polyreme_api.differences import leaves
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.accounting import Accounting, goodput_of
from tests.kept.folders import FINISHED, STOPPED, VERSIONS, copy_home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A finished run, and one that was stopped after a rank was killed."""
    return copy_home(VERSIONS[0], tmp_path)


def compare(home: Path, *arguments: str) -> int:
    return invoke(["--home", str(home), "runs", "compare", *arguments])


def test_only_fields_that_differ_are_shown_with_figures_of_each_run(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(home, FINISHED, STOPPED, "-o", "json") == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["item"]
    differences = {each["field"]: each["values"] for each in found["differences"]}
    assert differences["spec.training.steps"] == [2, 40]
    assert differences["spec.parallelism.dp"] == [None, 2]
    assert "spec.training.seed" not in differences
    finished, stopped = found["runs"]
    assert (finished["name"], finished["state"], finished["step"], finished["steps"]) == (FINISHED, "Succeeded", 2, 2)
    assert (stopped["name"], stopped["state"], stopped["attempts"], stopped["step"]) == (STOPPED, "Stopped", 2, 12)
    assert finished["bestLoss"] < finished["loss"]
    written = json.loads((home / "runs/default" / FINISHED / "state.json").read_text())
    for name in ("tokensPerSecond", "wallSeconds", "heldoutExactMatchRatio"):
        assert finished[name] == pytest.approx(written[name])
    account = Accounting.model_validate(written["status"]["accounting"])
    assert finished["goodputRatio"] == goodput_of(account.table)


def test_the_time_of_a_run_that_was_killed_ends_with_its_last_step(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / "runs/default" / STOPPED / "timeline.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert compare(home, FINISHED, STOPPED, "-o", "json") == ExitCode.OK
    orderly_s = json.loads(capsys.readouterr().out)["item"]["runs"][1]["wallSeconds"]
    path.write_text("".join(line for line in lines if '"stopped"' not in line))
    assert compare(home, FINISHED, STOPPED, "-o", "json") == ExitCode.OK
    assert 0 < json.loads(capsys.readouterr().out)["item"]["runs"][1]["wallSeconds"] <= orderly_s


def test_two_runs_are_columns_and_many_are_rows(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(home, FINISHED, STOPPED) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert ["training.optimizer.name", "Muon", "AdamW"] in [line.split() for line in lines]
    assert compare(home, *[FINISHED, STOPPED] * 3) == ExitCode.OK
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["NAME", "steps", "packsPerStep"]
    assert [row.split()[0] for row in rows] == [FINISHED, STOPPED] * 3


def test_what_an_objective_measures_has_a_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (steps,) = (home / "checkpoints/default" / FINISHED / "steps").glob("*.jsonl")
    records = [json.loads(line) | {"objective": {"accuracy": 0.75}} for line in steps.read_text().splitlines()]
    steps.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert compare(home, FINISHED, STOPPED) == ExitCode.OK
    assert ["accuracy", "0.75", "-"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        ([FINISHED], ExitCode.USAGE, "expected two or more"),
        ([FINISHED, "finishd"], ExitCode.NOT_FOUND, f"did you mean '{FINISHED}'?"),
    ],
)
def test_one_run_or_an_unknown_one_is_refused(
    names: list[str], code: ExitCode, words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(home, *names) == code
    assert words in capsys.readouterr().err


def test_leaves_are_named_as_differences_are() -> None:
    value = {"a": [{"b": 1}, {"b": {}}], "c": None}
    assert dict(leaves("spec", value)) == {"spec.a[0].b": 1, "spec.a[1].b": {}, "spec.c": None}
