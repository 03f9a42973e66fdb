"""``polyreme doctor`` and ``polyreme version``: what this machine offers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.run_files.paths import Home
from polyreme.views.output import Format, emit
from polyreme_api.exit_codes import ExitCode

FREE_BYTES_MIN = 2 * 2**30
"""Free disk below which checkpoints and data may not fit."""
MEMORY_BYTES_MIN = 3 * 2**30
PYTHON_MIN = (3, 11)
MODULES = ("torch", "numpy", "sqlalchemy", "obstore", "aiohttp", "tokenizers", "sklearn")
PACKAGES = ("polyreme", "torch", "numpy", "pydantic", "sqlalchemy", "obstore", "aiohttp")

OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Output format.")]


def version(output: OutputOption = Format.TABLE) -> None:
    """Print the versions of polyreme, Python and the libraries that affect results.

    Example: polyreme version -o json
    """
    found = {name: _version(name) for name in PACKAGES}
    value = {**found, "python": platform.python_version(), "platform": platform.platform()}
    emit("Version", value, output=output, columns=[(name, name) for name in value])


def doctor(context: typer.Context, output: OutputOption = Format.TABLE) -> int:
    """Check that this machine can run jobs; exit code 7 when it can't.

    Example: polyreme doctor
    """
    home: Home = context.obj
    checks: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("system", _system),
        ("python", _python),
        ("memory", _memory),
        ("home", lambda: _home(home.path)),
        ("disk", lambda: _disk(home.path)),
        ("loopback", _loopback),
        *((f"module {name}", lambda name=name: _module(name)) for name in MODULES),
    ]
    rows: list[dict[str, Any]] = []
    for name, check in checks:
        holds, found = check()
        rows.append({"check": name, "ok": holds, "found": found})
    emit("Doctor", rows, output=output, columns=[("CHECK", "check"), ("OK", "ok"), ("FOUND", "found")])
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
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total >= MEMORY_BYTES_MIN, f"{total / 2**30:.1f} GiB, {os.cpu_count()} cores"


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
