"""``polyreme profile``: two real ranks, a table by layer and exchange, a trace, and costs that the planner reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polyreme.main import invoke
from polyreme_api.exit_codes import ExitCode
from polyreme_planner.costs import Measured
from polyreme_planner.flops import training_flops
from polyreme_planner.hardware import HARDWARE
from polyreme_planner.model_parts import Part
from polyreme_planner.shapes import KIMI_VL_NANO
from tests.unit.api.jobs import job_with

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

SHELL = [sys.executable, "-c", "from polyreme.main import main; main()"]
"""The command in a process of its own: ranks are forked, and a process that has trained has threads."""


def test_a_profile_shows_where_the_time_went_and_the_planner_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, traces, costs = str(tmp_path / "job.yaml"), tmp_path / "traces", tmp_path / "costs.json"
    Path(path).write_text(yaml.safe_dump(job_with({"spec.workers.replicas": 2})))
    command = ["profile", path, "--steps", "1", "--trace", str(traces), "--costs", str(costs), "-o", "json"]
    ended = subprocess.run([*SHELL, *command], check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == ExitCode.OK, ended.stderr
    item = json.loads(ended.stdout)["item"]
    assert item["layout"] == "dp2"
    named = [(line["rank"], line["name"]) for line in item["layers"]]
    layers = ["tower", "projector", "dense layer 0", "moe layer 1", "moe layer 2"]
    assert named[:5] == [(0, name) for name in layers]
    assert {rank for rank, _ in named} == {0, 1}
    for line in item["layers"]:
        if line["name"] in layers:
            assert line["forward"] > 0
            assert line["backward"] > 0
            assert line["seconds"] <= item["stepSeconds"]
    assert {line["name"] for line in item["exchanges"]} == {"gloo:all_reduce"}

    measured = Measured.from_json(costs.read_text())
    assert set(measured.seconds_per_token) == set(Part)
    assert all(of.forward_s > 0 for of in measured.seconds_per_token.values())
    # Two ranks of 128 tokens each: the closed formula, by hand.
    peak = 2 * HARDWARE["cpu"].peak_flops_per_s * item["stepSeconds"]
    assert item["mfu"] == pytest.approx(training_flops(KIMI_VL_NANO, measured.mix) * 4 * 64 / peak)

    for rank in (0, 1):
        events = json.loads((traces / f"rank{rank}.json").read_text())["traceEvents"]
        seen = {event.get("name") for event in events}
        assert {"moe layer 1 forward", "moe layer 1 backward", "tower backward"} <= seen

    assert invoke(["plan", path, "--costs", str(costs), "-o", "json"]) == ExitCode.OK
    by_measure = json.loads(capsys.readouterr().out)["item"]
    assert invoke(["plan", path, "-o", "json"]) == ExitCode.OK
    by_rates = json.loads(capsys.readouterr().out)["item"]
    assert by_measure["stepSeconds"] != by_rates["stepSeconds"]

    assert invoke(["plan", path, "--costs", str(costs), "--hardware", "h100-80g"]) == ExitCode.USAGE
    assert "measured times are of other hardware: cpu" in capsys.readouterr().err
