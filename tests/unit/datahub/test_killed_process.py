"""A process killed at any effect loses nothing and doubles nothing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.datahub.jobs import Home, digits, picture, record, write_jsonl

pytestmark = pytest.mark.slow
KILLS = 6
ROOT = Path(__file__).parents[3]


def make_home(folder: Path, files: Path) -> Home:
    home = Home(folder)
    home.register("two", digits(2, pages=700))
    home.register("files", files)
    return home


def run(home: Home, effect: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.unit.datahub.crashing", str(home.folder), str(effect)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)


def test_killed_again_and_again_it_ends_with_the_same_index(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "good.png").write_bytes(picture(90, 60))
    (folder / "cut.jpg").write_bytes(picture(200, 150, kind="JPEG")[:900])
    files = write_jsonl(folder, [record("a", ["good.png"]), record("b", ["cut.jpg"]), "{", record("c")])
    expected = run(make_home(tmp_path / "whole", files), 0)
    assert expected.returncode == 0, expected.stderr
    assert expected.stdout.startswith("700:")
    doomed = make_home(tmp_path / "doomed", files)
    generator = random.Random(29)
    killed = 0
    for _ in range(KILLS):
        done = run(doomed, generator.randint(1, 24))
        killed += done.returncode == -signal.SIGKILL
    assert killed >= KILLS - 2
    assert run(doomed, 0).stdout == expected.stdout
