"""``polyreme profile``: what is refused, by it and by the planner that reads its costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from polyreme.main import invoke
from polyreme_api.exit_codes import ExitCode
from tests.unit.api.jobs import job_with

FEW = {
    "format": "polyreme.dev/costs/v1",
    "hardware": "cpu",
    "mix": {"sequence_tokens": 64, "image_patches": 128, "visual_share": 0.5},
    "secondsPerToken": {"head": {"forward_s": 1e-6, "input_s": 1e-6, "weight_s": 1e-6}},
}
"""Measured times of one part."""


def job_file(folder: Path, changes: dict[str, object]) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_with(changes)))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec.workers.replicas": 32, "spec.training.packsPerStep": 32}, "too many ranks for one machine: 32"),
        ({"spec.workers": {"runtime": {"mode": "Environment"}}}, "nothing to profile"),
    ],
)
def test_what_can_not_be_profiled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: str
) -> None:
    assert invoke(["profile", job_file(tmp_path, changes)]) == ExitCode.USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "other"}',
        json.dumps(FEW | {"secondsPerToken": {"head": {"forward_s": -1, "input_s": 0, "weight_s": 0}}}),
    ],
)
def test_costs_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(text)
    assert invoke(["plan", job_file(tmp_path, {}), "--costs", str(costs)]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "measured times can't be read" in told
    assert "--costs" in told


def test_costs_that_lack_a_part_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(FEW))
    assert invoke(["plan", job_file(tmp_path, {}), "--costs", str(costs)]) == ExitCode.USAGE
    assert "are missing for parts of the model: tower, embedding, dense layer, moe layer" in capsys.readouterr().err
