"""``polyreme sim``: a table of policies, a page, and refusals that name the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from polyreme.main import invoke
from polyreme_api.exit_codes import ExitCode
from tests.unit.api.jobs import job_with

SMALL = ["--runs", "2", "--days", "3", "--device-mttf-hours", "5000"]


def test_policies_are_compared_with_the_jobs_own_failure_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        yaml.safe_dump(
            job_with({"spec.workers": {"replicas": 64, "devices": 8}, "spec.failurePolicy": {"maxRestarts": 2}})
        )
    )
    page = tmp_path / "sim.html"
    options = ["--spares", "0,8", "--interval", "300,600", "--repair-hours", "0.1", "--page", str(page), "-o", "json"]
    options += ["--runs", "2", "--days", "3", "--device-mttf-hours", "512"]
    assert invoke(["sim", str(job), *options]) == ExitCode.OK
    shown = capsys.readouterr()
    item = json.loads(shown.out)["item"]
    assert [(row["spares"], row["intervalSeconds"]) for row in item["policies"]] == [
        (0, 300.0),
        (0, 600.0),
        (8, 300.0),
        (8, 600.0),
    ]
    assert item["faultEveryHours"] == pytest.approx(1.0)
    assert all(row["failedRuns"] == 1.0 for row in item["policies"]), "a fault an hour, and two restarts a day"
    assert "at most 2 are allowed" in shown.err
    html = page.read_text()
    assert html.count("<svg") == 1
    assert "8 spares, RestartProcess" in html
    assert "<script" not in html


def test_without_an_interval_the_best_one_is_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sim", "--nodes", "256", "--spares", "16", *SMALL]
    assert invoke([*command, "-o", "json"]) == ExitCode.OK
    half, best, double = json.loads(capsys.readouterr().out)["item"]["policies"]
    assert best["formula"] > max(half["formula"], double["formula"])
    assert half["intervalSeconds"] * 2 == pytest.approx(best["intervalSeconds"], abs=0.2)
    assert best["intervalSeconds"] * 2 == pytest.approx(double["intervalSeconds"], abs=0.2)
    assert invoke(command) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "a fault every, hours" in shown
    assert "longest recovery for the target, by formula" in shown


def test_a_jobs_own_faults_are_read_from_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restart = {"attempt": 1, "at": "2026-11-01T00:00:00Z", "cause": "NodeLost", "scope": "RestartPod"}
    cells = [
        {"what": what, "deviceMilliseconds": hours * 3_600_000}
        for what, hours in (("Productive", 900), ("Starting", 100))
    ]
    job = job_with({"spec.workers": {"replicas": 2, "devices": 4}}) | {
        "status": {
            "attempt": {"number": 2, "planHash": "x", "replicas": 2, "devices": 4},
            "step": 1000,
            "restarts": 1,
            "restartRecords": [restart],
            "accounting": {"cells": cells},
        }
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    assert (
        invoke(["sim", "--fit", str(path), "--spares", "2", "--days", "30", "--runs", "2", "-o", "json"]) == ExitCode.OK
    )
    item = json.loads(capsys.readouterr().out)["item"]
    assert item["fitted"]["deviceMttfHours"] == 1000
    assert item["fitted"]["measuredShare"] == 0.9
    assert item["faultEveryHours"] == 125
    assert item["fitted"]["intervalSeconds"] in [row["intervalSeconds"] for row in item["policies"]]
    assert invoke(["sim", str(path), "--fit", str(path)]) == ExitCode.USAGE
    assert invoke(["sim", "--fit", "no-such-run"]) == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "JOB or --nodes"),
        (["--nodes", "4", "--set", "failurePolicy.maxRestarts=9"], "JOB or --set"),
        (["--nodes", "4", "--spares", "1.5"], "--spares"),
        (["--nodes", "4", "--interval", "soon"], "--interval"),
        (["--nodes", "4", "--interval", "30", "--durable", "60"], "--durable"),
        (["--nodes", "4", "--rung", "RestartWorld"], "--rung"),
        (["--nodes", "4", "--restart-seconds", "1,2"], "--restart-seconds"),
        (["--nodes", "4", "--target", "1"], "--target"),
        (["--nodes", "4", "--days", "0"], "--days"),
        (["--nodes", "4", "--recall", "2"], "--recall"),
        (["--nodes", "100000", "--days", "3000"], "--days or --runs"),
    ],
)
def test_options_that_cant_be_are_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["sim", *options]) == ExitCode.USAGE
    assert says in capsys.readouterr().err
