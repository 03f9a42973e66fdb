"""NVML through nvidia-ml-py itself, on a library that this test compiles in the place of NVIDIA's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyreme_agent.findings import Finding, Look, State
from polyreme_agent.nvml import STUCK_S, InThread, Nvml

SOURCE = Path(__file__).with_name("mock_nvml.c")
SCRIPT = """
import importlib, json, sys
from polyreme_agent.nvml import Nvml
look = Nvml(lambda: importlib.import_module("pynvml"), expected=lambda: int(sys.argv[1]), now_s=lambda: 7.0).look()
pairs = lambda found: [[each.code, each.device, each.action or each.text] for each in found]
print(json.dumps([look.state, look.why, pairs(look.present), pairs(look.occurred), pairs(look.verdicts)]))
"""
NONE = [["GPURecoveryAction", "0000:3b:00", "None"], ["GPURecoveryAction", "0000:3c:00", "None"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    assert compiler, "no C compiler: install one (apt-get install gcc), the stand-in for NVIDIA's library is compiled"
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    return folder


def _look(folder: Path, expected: int = 2, **mock: int) -> list[Any]:
    values = {f"MOCK_{name.upper()}": str(value) for name, value in mock.items()}
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), **values}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(expected)], env=environment, check=True, capture_output=True, text=True
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def test_calm_gpus_have_no_fault_and_the_drivers_verdict_is_none(folder: Path) -> None:
    assert _look(folder) == ["works", "", [], [], NONE]


def test_faults_recovery_actions_and_xids_are_found(folder: Path) -> None:
    state, _, present, occurred, verdicts = _look(folder, pending=1, failed=1, ecc=3, recovery=2, xid=79)
    assert state == "works"
    assert {code for code, _, _ in present} == {"GPURowRemapPending", "GPURowRemapFailed", "GPUDoubleBitError"}
    assert occurred == [["Xid79", "0000:3b:00", ""]]
    assert [action for _, _, action in verdicts] == ["Reboot", "Reboot"]


def test_a_gpu_that_is_lost_or_never_came_is_missing(folder: Path) -> None:
    assert _look(folder, lost=0)[2] == [["GPUMissing", "", "1 of 2 GPUs answer"]]
    assert _look(folder, expected=8)[2] == [["GPUMissing", "", "2 of 8 GPUs answer"]]


def test_what_a_gpu_does_not_support_is_no_fault_and_another_error_is_shown(folder: Path) -> None:
    assert _look(folder, ecc_answer=3) == ["works", "", [], [], NONE]
    assert {code for code, _, _ in _look(folder, ecc_answer=999)[2]} == {"GPUUnknownAnswer"}


def test_a_driver_that_is_not_there_is_absent_and_with_gpus_on_the_bus_a_failure(folder: Path) -> None:
    assert _look(folder, expected=0, init=9)[:2] == ["absent", "NVIDIA's driver is not loaded"]
    assert _look(folder, init=9)[:2] == ["failed", "NVIDIA's driver is not loaded, though the bus has 2 GPUs"]


def test_a_call_that_hangs_is_a_failure_and_no_xid_is_lost_between_looks() -> None:
    now_s = 0.0

    class Answering(Nvml):
        def look(self) -> Look:
            return Look(state=State.WORKS, occurred=(Finding(code="Xid79"),))

    def load() -> None:
        raise AssertionError

    collector = InThread(Answering(load, expected=lambda: 0, now_s=lambda: 0.0), uptime_s=lambda: now_s, every_s=0.001)
    found: list[Finding] = []
    while len(found) < 3:
        found += collector.look().occurred
    collector.close()
    now_s = 2 * STUCK_S
    while collector.look().state is not State.FAILED:
        now_s += STUCK_S
    assert "a call into the driver hangs" in collector.look().why
