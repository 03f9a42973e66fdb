"""Commands of the kept chart still start: users may set newer images' tags before they upgrade the chart."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

CHART = Path(__file__).parents[2] / "nodes/kept/polyreme-0.1.0.tgz"
MODULES = re.compile(r"command: \[python, -m, ([\w.]+)\]")


def modules() -> list[str]:
    """Python modules that pods of the kept chart run."""
    with tarfile.open(CHART) as chart:
        texts = [chart.extractfile(each) for each in chart if "/templates/" in each.name]
        found = {name for text in texts if text is not None for name in MODULES.findall(text.read().decode())}
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("module", modules())
def test_module_that_the_kept_chart_runs_has_help(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout.lower()


def test_kept_chart_runs_modules() -> None:
    assert "polyreme.data.main" in modules()
