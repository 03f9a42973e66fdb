"""``make gpu-day`` on a processor: a call continues where an earlier one ended, and the table names what is left."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.gpu import day, harness

from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import parse_job
from polyreme_planner.hardware import HARDWARE
from polyreme_planner.plan import plan_for
from polyreme_trainer.parallel import flash
from tests.device import conftest

ROOT = Path(__file__).parents[3]


def call(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # As make does: a script's own folder is no place to import from.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
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


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    ended = call(tmp_path)
    assert ended.returncode == ExitCode.ENVIRONMENT
    assert ended.stderr.startswith("no CUDA device")


def test_suite_and_device_tests_take_the_flash_kernels_that_ranks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYREME_TEST_DEVICE", raising=False)
    for name, answer in {
        "is_available": True, "get_device_name": "NVIDIA H200", "get_device_capability": (9, 0), "set_device": None
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(flash, "list_flash_attention_impls", lambda: [flash.NEWEST])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    activated: list[str] = []
    monkeypatch.setattr(flash, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(harness, "_device_state", lambda _: "")
    assert harness.device_figures(harness.find_place(rehearse=False))["flash"] == flash.NEWEST
    assert conftest.take_device()[1] == flash.NEWEST
    assert activated == [flash.NEWEST] * 2


def test_floors_take_the_data_sheets_rate_of_memory() -> None:
    sheets = {"h100-80g": 3.35e12, "h200-141g": 4.8e12, "a100-80g": 2.039e12, "h20-96g": 4.0e12, "b200-180g": 8e12}
    for name, bytes_per_s in sheets.items():
        place = harness.Place(device=torch.device("cpu"), rehearsal=True, hardware=HARDWARE[name])
        assert place.peak_bytes_per_s == pytest.approx(bytes_per_s), name


PART = """
import json, os, subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
for case in ("first", "second"):
    print("a line of a library")
    print(json.dumps({"figures": {case: sleeper.pid}}), flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(20)
def test_a_part_past_its_limit_leaves_its_figures_and_no_process(tmp_path: Path) -> None:
    part = day.Part(name="G1", limit_s=5, command=lambda _: [sys.executable, "-c", PART])
    found = day.run(part, day.Day(folder=tmp_path, devices=(), ours_only=True), 5)
    assert (found["ok"], found["why"]) == (False, "took longer than 5 s")
    figures = found["figures"]
    assert figures["first"] == figures["second"]
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(figures["first"]).status() != psutil.STATUS_ZOMBIE:  # the test's limit ends this
            time.sleep(0.01)


def test_a_suite_killed_at_its_limit_keeps_the_cases_that_are_done(tmp_path: Path) -> None:
    figures: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for case in ("a", "b"):
            harness.attempt(figures, case, lambda case=case: {case: 1})  # type: ignore[misc]
    assert day.figures_of("noise\n" + printed.getvalue()) == {"a": 1, "b": 1}
    assert "--quick" in day.benchmark("G1")(day.Day(folder=tmp_path, devices=("NVIDIA H200",), ours_only=False))


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
    assert rows["MFU of AutoModel, published"][0] == "0.33 to 0.34"
    assert rows["G1"][0] == "met"
    assert rows["G2"][0] == "ended with code 1"
    assert rows["G3"][0] == "left"


@pytest.mark.parametrize(
    ("devices", "ranks", "hardware", "layers"),
    [
        ((), 2, None, 3),
        (("NVIDIA H100 80GB HBM3",) * 8, 8, "h100-80g", 6),
        (("NVIDIA H100 80GB HBM3",), 1, "h100-80g", 5),
        (("NVIDIA A100-SXM4-80GB",), 1, "a100-80g", 5),
    ],
)
def test_the_traced_job_is_as_deep_as_fits_the_devices_of_the_machine(
    devices: tuple[str, ...], ranks: int, hardware: str | None, layers: int
) -> None:
    spec = parse_job(day.traced_job(devices)).spec
    plan = plan_for(spec)
    assert (plan.layout.world, plan.layout.ep) == (ranks, ranks)
    assert spec.workers.hardware == hardware
    assert plan.shape.decoder.layers == layers
