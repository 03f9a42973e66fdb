"""Planted bugs keep the simulator honest. A file of their own: it runs beside the thousand seeds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.sim.planted_bugs import CAUGHT_WITHIN, PLANTED, QUICKLY_CAUGHT, ROOT, first_caught, patch_file


def test_every_planted_bug_has_its_bound() -> None:
    assert sorted(CAUGHT_WITHIN) == sorted(path.stem for path in PLANTED.glob("*.patch"))


@pytest.mark.parametrize("bug", sorted(CAUGHT_WITHIN))
def test_a_planted_bug_still_fits_the_sources(bug: str) -> None:
    checked = subprocess.run(
        ["git", "apply", "--check", str(patch_file(bug))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", sorted(QUICKLY_CAUGHT))
def test_the_simulator_catches_a_planted_bug(bug: str, tmp_path: Path) -> None:
    assert first_caught(bug, tmp_path) is not None, f"{bug} went unseen for {CAUGHT_WITHIN[bug]} seeds"
