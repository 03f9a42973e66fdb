"""Environments of their own for tools that only tests and benchmarks use, each made once for what is pinned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.build_cache import built, cache_folder


def pinned(path: Path) -> list[str]:
    """Return the requirements of a file."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def environment(name: str, requirements: list[str], *options: str) -> Path:
    """Return the Python of an environment with these requirements.

    Args:
        name: Part of its folder's name.
        requirements: What is installed.
        options: Of ``uv pip install``.
    """
    folder = cache_folder(os.environ, name, [" ".join([*options, *requirements]).encode()])
    python, made = folder / "environment/bin/python", folder / "made"

    def make() -> None:
        uv = Path(sys.executable).with_name("uv")
        create = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, python.parents[1]]
        install = [uv, "pip", "install", "--quiet", "--python", python, *options, *requirements]
        for command in (create, install):
            subprocess.run([str(word) for word in command], check=True)
        made.touch()

    built(made, make)
    return python
