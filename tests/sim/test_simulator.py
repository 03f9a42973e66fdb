"""The simulator keeps the operator honest; planted bugs keep the simulator honest."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme_operator.sim.run import simulate

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
SEEDS = range(24)
CAUGHT_WITHIN = {
    "model_goes_back_in_time": 51,
    "released_before_all_joined": 4,
    "replacement_does_not_wait": 40,
    "restarts_not_counted": 100,
    "stale_progress_counts": 20,
    "status_written_without_version": 80,
    "success_not_looked_for": 20,
    "usage_freed_with_the_attempt": 20,
}
"""Seeds within which the simulator must see each bug."""


@pytest.mark.slow
def test_no_seed_breaks_a_rule() -> None:
    broken = {seed: result.violations for seed in SEEDS if (result := simulate(seed)).violations}
    assert broken == {}


@pytest.mark.slow
def test_without_faults_every_job_succeeds_in_one_attempt() -> None:
    for seed in range(6):
        result = simulate(seed, faults=False)
        assert result.violations == ()
        assert result.attempts == result.succeeded


@pytest.mark.slow
def test_a_seed_replays_to_the_same_trace_in_another_process() -> None:
    command = [sys.executable, "-m", "polyreme_operator.sim", "--seed", "3"]
    said = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert simulate(3).trace in said[0]


def test_every_planted_bug_has_its_bound() -> None:
    assert sorted(CAUGHT_WITHIN) == sorted(path.stem for path in PLANTED.glob("*.patch"))


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(CAUGHT_WITHIN))
def test_the_simulator_catches_a_planted_bug(bug: str, tmp_path: Path) -> None:
    for root, package in (("api", "polyreme_api"), ("operator", "polyreme_operator")):
        shutil.copytree(ROOT / root / package, tmp_path / root / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(PLANTED / f"{bug}.patch")], cwd=tmp_path, check=True)
    seeds = str(CAUGHT_WITHIN[bug])
    command = [sys.executable, "-m", "polyreme_operator.sim", "--seeds", seeds, "--processes", "1", "--until-violation"]
    path = os.pathsep.join(str(tmp_path / root) for root in ("api", "operator"))
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    verdict = json.loads(ran.stdout.splitlines()[-1])
    assert verdict["figures"]["violations"] > 0, f"{bug} went unseen for {seeds} seeds"
