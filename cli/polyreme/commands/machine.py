"""``polyreme doctor`` and ``polyreme version``: what this machine offers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import typer

from polyreme.run_files.paths import Home
from polyreme.views.output import Format, OutputOption, columns_of, emit, lines
from polyreme_api.exit_codes import ExitCode
from polyreme_planner.hardware import SHARED_MEMORY_BYTES_MIN

FREE_BYTES_MIN = 2 * 2**30
"""Free disk below which checkpoints and data may not fit."""
MEMORY_BYTES_MIN = 3 * 2**30
PYTHON_MIN = (3, 11)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, never written
SHARED_BYTES_MIN = 64 * 2**20
"""Of a machine with one device or none; several need more."""
GPU_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.free", "ecc.errors.uncorrected.volatile.total")
GPU_ANSWER_S = 20.0
"""Longest wait for the driver: it may block on a device that is broken."""
GPU_FREE_SHARE_MIN = 0.9
"""Free share of a device's memory below which another process uses it."""
MODULES = ("torch", "numpy", "sqlalchemy", "obstore", "aiohttp", "tokenizers", "sklearn")
PACKAGES = ("polyreme", "torch", "numpy", "pydantic", "sqlalchemy", "obstore", "aiohttp")


def version(output: OutputOption = Format.TABLE) -> None:
    """Print the versions of polyreme, Python and the libraries that affect results.

    Example: polyreme version -o json
    """
    found = {name: _version(name) for name in PACKAGES}
    value = {**found, "python": platform.python_version(), "platform": platform.platform()}
    emit("Version", value, output=output, columns=lines(*value))


def doctor(context: typer.Context, output: OutputOption = Format.TABLE) -> int:
    """Check that this machine can run jobs, and look at its GPUs; exit code 7 when it can't.

    Example: polyreme doctor
    """
    home: Home = context.obj
    devices = gpus()
    checks: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("system", _system),
        ("python", _python),
        ("memory", _memory),
        ("home", lambda: _home(home.path)),
        ("disk", lambda: _disk(home.path)),
        ("shared memory", lambda: _shared_memory(sum(name.startswith("gpu ") for name, _, _ in devices))),
        ("loopback", _loopback),
        *((f"module {name}", lambda name=name: _module(name)) for name in MODULES),
    ]
    rows: list[dict[str, Any]] = []
    for name, check in checks:
        holds, found = check()
        rows.append({"check": name, "ok": holds, "found": found})
    rows += [{"check": name, "ok": holds, "found": found} for name, holds, found in devices]
    emit("Doctor", rows, output=output, columns=columns_of("check", "ok", "found"))
    return ExitCode.OK if all(row["ok"] for row in rows) else ExitCode.ENVIRONMENT


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _system() -> tuple[bool, str]:
    holds = sys.platform == "linux"
    return holds, platform.platform() if holds else f"{sys.platform}: pods run as processes on Linux only"


def _python() -> tuple[bool, str]:
    return sys.version_info >= PYTHON_MIN, platform.python_version()


def _memory() -> tuple[bool, str]:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} cores"
    return memory.total >= MEMORY_BYTES_MIN, found


def _home(path: Path) -> tuple[bool, str]:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".doctor.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        return False, f"{path}: {error.strerror}; set POLYREME_HOME to a folder that can be written"
    return True, str(path)


def _disk(path: Path) -> tuple[bool, str]:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    return free >= FREE_BYTES_MIN, f"{free / 2**30:.1f} GiB free"


def _shared_memory(devices: int) -> tuple[bool, str]:
    least = SHARED_MEMORY_BYTES_MIN if devices > 1 else SHARED_BYTES_MIN
    if not SHARED_MEMORY.is_dir():
        return devices <= 1, f"no {SHARED_MEMORY}"
    found = shutil.disk_usage(SHARED_MEMORY)
    words = f"{found.free / 2**30:.1f} of {found.total / 2**30:.1f} GiB free"
    if found.total >= least:
        return True, words
    return False, f"{words}; ranks need {least // 2**20} MiB: in a container, raise its shm size"


def gpus() -> list[tuple[str, bool, str]]:
    """Look at NVIDIA's devices by their driver's own program: name, whether it is good, and what was found."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [("gpus", True, "none: no nvidia-smi, so jobs run on processors")]
    query = [program, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=GPU_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [("gpus", False, f"nvidia-smi gives no answer: {error}; see `dmesg` for the driver")]
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines()
        return [("gpus", False, f"nvidia-smi failed with {done.returncode}: {words[-1] if words else 'no word'}")]
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [_gpu(row) for row in rows] + ([_torch_build()] if rows else [])


def _gpu(row: Sequence[str]) -> tuple[str, bool, str]:
    if len(row) != len(GPU_FIELDS):
        return "gpu", False, f"nvidia-smi wrote {', '.join(row)!r}, expected {', '.join(GPU_FIELDS)}"
    index, name, driver, total, free, errors = row
    words = f"{name}, {free} of {total} MiB free, driver {driver}"
    if errors.isdigit() and int(errors):
        return (
            f"gpu {index}",
            False,
            f"{words}, {errors} uncorrected memory errors since the driver was loaded: reset it",
        )
    if total.isdigit() and free.isdigit() and int(free) < GPU_FREE_SHARE_MIN * int(total):
        return f"gpu {index}", False, f"{words}: another process holds its memory (`nvidia-smi` names it)"
    return f"gpu {index}", True, words


def _torch_build() -> tuple[str, bool, str]:
    """Read for which devices torch was built, from its file of versions: importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "torch for GPUs", False, "torch is missing"
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b[^=]*= *['\"](.+?)['\"]", text, re.MULTILINE)
    if cuda is None:
        return "torch for GPUs", False, f"torch {_version('torch')} was built without CUDA; install a build with it"
    return "torch for GPUs", True, f"torch {_version('torch')}, CUDA {cuda[1]}"


def _loopback() -> tuple[bool, str]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return True, f"127.0.0.1:{server.getsockname()[1]} can be bound"
    except OSError as error:
        return False, f"127.0.0.1 can't be bound: {error.strerror}"


def _module(name: str) -> tuple[bool, str]:
    found = importlib.util.find_spec(name) is not None
    return found, _version(
        "scikit-learn" if name == "sklearn" else name
    ) if found else "missing; pip install '.[run]' in the checkout"
