"""``make gpu-day`` on a processor: a call continues where an earlier one ended, and the table names what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import day

from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import parse_job
from polyreme_planner.plan import plan_for

ROOT = Path(__file__).parents[3]


def call(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "benchmarks/gpu/day.py", "--folder", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rehearsal_runs_every_part_once_and_a_second_call_none(tmp_path: Path) -> None:
    first = call(tmp_path, "--rehearse", "--ours-only", "--only", "tests", "trace")
    assert "left or failed: G1, G2" in first.stdout, first.stderr
    whole = call(tmp_path, "--rehearse", "--ours-only")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (folder,) = tmp_path.iterdir()
    step = json.loads((folder / "trace.json").read_text())["figures"]
    assert 0 < step["exposedExchangeSeconds"] < step["stepSeconds"]
    assert len(list((folder / "traces").iterdir())) == 2
    again = call(tmp_path, "--rehearse", "--ours-only")
    assert again.returncode == 0
    assert "at most" not in again.stderr, "nothing is left to run"


def test_without_a_device_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "cuda_devices", lambda: ())
    monkeypatch.setattr(sys, "argv", ["day.py", "--folder", str(tmp_path)])
    assert day.main() == ExitCode.ENVIRONMENT


def test_a_report_that_was_cut_off_is_none_and_the_table_says_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "G1.json").write_text('{"ok": true, "fig')
    assert day.read(tmp_path / "G1.json") is None
    suite = {"text_4k_balanced_ours_mfu": 0.4123, "text_4k_balanced_torchtitan_skipped": "not installed"}
    reports = {
        "G1": {"ok": True, "why": "", "wall_s": 9.0, "figures": suite},
        "G2": {"ok": False, "why": "ended with code 1", "wall_s": 2.0, "figures": {}},
        "trace": {"ok": True, "why": "", "wall_s": 5.0, "figures": {"peakBytes": 2**31, "plannedBytes": 2**32}},
    }
    rows = {what: (measured, beside) for what, measured, beside in day.rows_of(reports)}
    assert rows["MFU, 4K text, balanced"] == ("0.4123", "goal 0.4")
    assert rows["MFU of torchtitan"] == ("-", "not installed")
    assert rows["peak memory [GiB]"] == ("2.00 GiB", "planned 4.00 GiB")
    assert rows["G1"][0] == "met"
    assert rows["G2"][0] == "ended with code 1"
    assert rows["G3"][0] == "left"


@pytest.mark.parametrize(
    ("devices", "ranks", "hardware"), [((), 2, None), (("NVIDIA H100 80GB HBM3",) * 8, 8, "h100-80g")]
)
def test_the_traced_job_is_planned_on_the_devices_of_the_machine(
    devices: tuple[str, ...], ranks: int, hardware: str | None
) -> None:
    spec = parse_job(day.traced_job(devices)).spec
    plan = plan_for(spec)
    assert (plan.layout.world, plan.layout.ep) == (ranks, ranks)
    assert spec.workers.hardware == hardware
