"""The report of a run: samples without an image, and what a report that can't be made costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme.report.publisher import publish
from polyreme.run_files.paths import Home
from polyreme.run_files.records import RunRecords
from polyreme.run_files.timeline import Moment
from polyreme_api.job import TrainingJob
from tests.unit.cli.test_cli_verdict import job

NOW = Moment(at_s=2.0, kind="finished", attempt=1, text="")
SUCCEEDED = job(("Succeeded", "True", "Completed", "trained 2 steps"))


def records(*digests: str) -> RunRecords:
    """A run whose held-out samples have these images."""
    asked = {"set": "h", "question": "Say b", "expected": "b", "answer": "b", "match": True}
    pages = [{**asked, "imageDigest": digest} for digest in digests]
    return RunRecords(points=(), steps={}, checkpoints=(), evaluation={"exactMatchRatio": 1.0, "pages": pages})


def written(home: Home, shown: RunRecords, of: TrainingJob = SUCCEEDED) -> Path | None:
    run = home.run("default", "a")
    run.path.mkdir(parents=True)
    return publish(home, run, of, shown, [], now=NOW)


@pytest.mark.parametrize("digest", ["", "sha256:" + "0" * 64])
def test_a_held_out_sample_is_shown_without_its_image(digest: str, tmp_path: Path) -> None:
    home = Home(path=tmp_path)
    home.prepare_data()
    path = written(home, records(digest))
    assert path is not None
    assert "Say b" in path.read_text()
    assert "no picture" in path.read_text()


def test_a_report_that_cannot_be_made_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(path=tmp_path)
    assert written(home, RunRecords(points=(), steps={}, checkpoints=(), evaluation={"pages": [{}]})) is None
    said = capsys.readouterr().err
    assert "no report: " in said
    assert "the run itself is not affected" in said


def test_a_folder_in_the_place_of_the_report_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(path=tmp_path)
    (home.run("default", "a").report / "report.html" / "x").mkdir(parents=True)
    assert publish(home, home.run("default", "a"), SUCCEEDED, records(""), [], now=NOW) is None
    assert "report.html" in capsys.readouterr().err
