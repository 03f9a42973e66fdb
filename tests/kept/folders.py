"""The versions with kept files, and copies of them that a test may change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

VERSIONS = sorted(Path(__file__).parent.glob("v*"))
"""A folder for each version."""
STOPPED, FINISHED = "stopped", "finished"
"""Names of the two runs of a kept home."""


def copy_home(version: Path, folder: Path) -> Path:
    """Copy a version's home to a new folder."""
    return Path(shutil.copytree(version / "home", folder / "home"))


def read_values(version: Path) -> dict[str, Any]:
    """Read the values that every later version must read from the home."""
    values: dict[str, Any] = json.loads((version / "values.json").read_text())
    return values


def read_cluster(version: Path) -> dict[str, Any]:
    """Read the objects of the kept cluster, with the newest resource version and the time of the last write."""
    content: dict[str, Any] = json.loads((version / "cluster.json").read_text())
    return content
