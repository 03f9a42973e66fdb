"""``polyreme doctor``: what it says of GPUs, by what their driver's program writes."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from polyreme.commands import machine
from polyreme.commands.machine import gpus
from polyreme.main import invoke
from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.parallel.device import check_shared_memory


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs; only what a test writes there is found."""
    monkeypatch.setenv("PATH", f"{tmp_path}")
    return tmp_path / "nvidia-smi"


def write(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_a_machine_without_gpus_is_good(driver: Path) -> None:
    assert not driver.exists()
    assert gpus() == [("gpus", True, "none: no nvidia-smi, so jobs run on processors")]


@pytest.mark.parametrize(
    ("rows", "holds", "says"),
    [
        (
            "0, NVIDIA H200, 580.95.05, 143771, 143000, 0",
            True,
            "NVIDIA H200, 143000 of 143771 MiB free, driver 580.95.05",
        ),
        ("3, NVIDIA H200, 580.95.05, 143771, 143000, 2", False, "2 uncorrected memory errors"),
        ("0, NVIDIA H200, 580.95.05, 143771, 900, 0", False, "another process holds its memory"),
        ("0, NVIDIA L4, 580.95.05, 23034, 23000, [N/A]", True, "NVIDIA L4"),
        ("0, NVIDIA H200", False, "expected index, name"),
    ],
)
def test_each_gpu_is_a_row(driver: Path, rows: str, holds: bool, says: str) -> None:
    write(driver, f"echo '{rows}'")
    (name, found, words), build = gpus()
    assert name == (f"gpu {rows[0]}" if len(rows) > 20 else "gpu")
    assert found is holds
    assert says in words
    assert build[0] == "torch for GPUs"


@pytest.mark.parametrize(
    ("script", "waits_s", "says"),
    [
        ("exec /bin/sleep 60", 0.5, "gives no answer"),
        ("echo 'No devices were found' >&2; exit 6", 60.0, "failed with 6: No devices were found"),
    ],
)
def test_a_driver_that_fails_is_named(
    driver: Path, monkeypatch: pytest.MonkeyPatch, script: str, waits_s: float, says: str
) -> None:
    monkeypatch.setattr(machine, "GPU_ANSWER_S", waits_s)
    write(driver, script)
    ((name, holds, words),) = gpus()
    assert (name, holds) == ("gpus", False)
    assert says in words


@pytest.mark.parametrize(("cuda", "holds"), [("None", False), ("'13.0'", True)])
def test_a_torch_without_cuda_is_named_where_there_are_gpus(
    driver: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, holds: bool
) -> None:
    write(driver, "echo '0, NVIDIA H200, 580.95.05, 143771, 143000, 0'")
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: None = None\n")
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    name, holds_now, words = gpus()[-1]
    assert (name, holds_now) == ("torch for GPUs", holds)
    assert ("CUDA 13.0" if holds else "without CUDA") in words


@pytest.mark.parametrize(
    ("devices", "mib", "holds"), [(0, 64, True), (1, 64, True), (2, 64, False), (2, 255, False), (2, 256, True)]
)
def test_several_gpus_need_the_shared_memory_that_their_ranks_check(
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: int,
    mib: int,
    holds: bool,
) -> None:
    write(driver, "".join(f"echo '{number}, NVIDIA H200, 580.95.05, 143771, 143000, 0';" for number in range(devices)))
    usage = shutil.disk_usage("/")._replace(total=mib << 20, free=mib << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    invoke(["doctor", "-o", "json"])
    (row,) = (row for row in json.loads(capsys.readouterr().out)["items"] if row["check"] == "shared memory")
    assert row["ok"] is holds
    assert holds or "ranks need 256 MiB" in row["found"]
    if devices > 1:
        with contextlib.nullcontext() if holds else pytest.raises(InvalidConfigError):
            check_shared_memory(devices, Path("/"))
