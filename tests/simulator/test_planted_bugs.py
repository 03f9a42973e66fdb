"""Planted bugs keep the simulator honest. ``make soak-sim`` and ``make soak-health`` look for all of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.simulator.planted_bugs import (
    CAUGHT_WITHIN,
    PLANTED,
    ROOT,
    SHOWN_BY,
    first_caught,
    patch_file,
    plant,
    shown_by,
)


def test_every_planted_bug_has_its_bound() -> None:
    planted = sorted(path.stem for path in PLANTED.glob("*.patch"))
    assert sorted(CAUGHT_WITHIN) == planted
    assert SHOWN_BY.keys() <= CAUGHT_WITHIN.keys()


@pytest.mark.parametrize("bug", sorted(CAUGHT_WITHIN))
def test_a_planted_bug_still_fits_the_sources(bug: str) -> None:
    checked = subprocess.run(
        ["git", "apply", "--check", str(patch_file(bug))], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", sorted(SHOWN_BY))
def test_the_simulator_catches_a_planted_bug(bug: str, tmp_path: Path) -> None:
    """By the seeds that are known to show it; where a change of the sources has moved those, by any."""
    plant(bug, tmp_path)
    if shown_by(bug, tmp_path) is None:
        seeds = first_caught(bug, tmp_path)
        assert seeds is not None, f"{bug} went unseen by its own seeds, and for {CAUGHT_WITHIN[bug]} more"
        print(f"{bug} is seen by seed {seeds - 1} now: put it into SHOWN_BY")
