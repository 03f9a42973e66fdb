"""Bugs that the simulator must see: patches on a copy of the sources, and the seeds within which each is seen.

A bound is two to three times the seeds that it took when it was measured, and 10 at least: every change of the sources
draws other seeds. Bugs that take longer than the tests have are the soak's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
SOURCES = (("api", "polyreme_api"), ("operator", "polyreme_operator"))
QUICKLY_CAUGHT = {
    "bound_without_uid": 10,
    "delete_without_uid": 10,
    "exclusive_domains_leak": 10,
    "foreign_pods_not_counted": 10,
    "leader_runs_on": 12,
    "preemption_without_deadline": 20,
    "quota_forgets_its_borrowing_limit": 10,
    "reason_goes_stale": 10,
    "released_before_all_joined": 10,
    "released_before_the_lease_says_so": 10,
    "role_outlives_its_job": 10,
    "stale_progress_counts": 20,
    "status_written_without_version": 10,
    "success_not_looked_for": 10,
    "usage_freed_with_the_attempt": 10,
    "victim_preempted_twice": 10,
}
"""Seeds, from 0 on, within which the tests must see each of these."""
SELDOM_CAUGHT = {
    "hang_on_one_signal": 60,
    "intents_not_settled": 45,
    "place_lost_with_the_admission": 66,
    "replacement_does_not_wait": 300,
    "reservation_ignored": 300,
    "restarts_not_counted": 84,
    "resume_point_fixed_per_call": 84,
}
"""The same for the soak: these take more than ten seeds, so each would cost the tests half a minute."""
CAUGHT_WITHIN = QUICKLY_CAUGHT | SELDOM_CAUGHT


def patch_file(bug: str) -> Path:
    """Return the file of a bug's patch."""
    return PLANTED / f"{bug}.patch"


def first_caught(bug: str, directory: Path, *, processes: int = 1) -> int | None:
    """Plant a bug on a copy of the sources and return how many seeds it takes to see it; None if all its seeds miss it.

    Args:
        bug: Which.
        directory: An empty directory for the copy.
        processes: Processes to use.
    """
    for root, package in SOURCES:
        shutil.copytree(ROOT / root / package, directory / root / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(patch_file(bug))], cwd=directory, check=True)
    seeds = ("--seeds", str(CAUGHT_WITHIN[bug]), "--processes", str(processes), "--until-violation")
    path = os.pathsep.join(str(directory / root) for root, _ in SOURCES)
    ran = subprocess.run(
        [sys.executable, "-m", "polyreme_operator.sim", *seeds],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])["figures"]
    return int(figures["seeds"]) if figures["violations"] else None
