"""Bugs that the simulator must see: patches on a copy of the sources, and within how many seeds each is seen.

The soaks look for each from seed 0 on, within a bound that is two to three times the seeds that it took when it was
measured, and 10 at least: up to a minute and a half. The tests look for three of them, by seeds that show them at once,
in some 2 s; a change of the sources draws other seeds, so put the seed that the test prints into ``SHOWN_BY`` then.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
SOURCES = (
    ("api", "polyreme_api"),
    ("operator", "polyreme_cluster"),
    ("operator", "polyreme_operator"),
    ("trainer", "polyreme_launcher"),
)
SHOWN_BY: dict[str, tuple[int, ...]] = {
    "delete_without_uid": (0,),
    "stopped_leader_writes": (6,),
    "usage_freed_with_the_attempt": (0,),
}
"""What the tests look for: a bug of a write, one of an election, one of a queue."""
CAUGHT_WITHIN = {
    "absent_node_is_lost": 250,
    "bound_without_uid": 10,
    "breaker_charged_without_version": 21,
    "breaker_forgets_charges": 30,
    "data_of_another_spec_counts": 150,
    "delete_without_uid": 10,
    "examination_looks_at_nothing": 20,
    "exclusive_domains_leak": 10,
    "first_data_report_stays": 40,
    "foreign_pods_not_counted": 20,
    "foreign_taint_dropped": 20,
    "hang_on_one_signal": 60,
    "incident_named_by_the_clock": 20,
    "intents_not_settled": 45,
    "leader_runs_on": 20,
    "lease_lost_with_its_owner": 20,
    "malformed_object_raises": 60,
    "node_tainted_without_a_charge": 20,
    "older_record_counts": 10,
    "place_lost_with_the_admission": 66,
    "priority_max_ignored": 10,
    "preemption_without_deadline": 20,
    "quota_forgets_its_borrowing_limit": 10,
    "refused_child_counts_as_created": 10,
    "refused_child_tried_too_late": 60,
    "refused_job_waits": 10,
    "reason_goes_stale": 10,
    "rejected_pod_costs_budget": 24,
    "rejecting_node_is_not_left": 180,
    "released_before_all_joined": 10,
    "released_before_the_lease_says_so": 10,
    "replacement_does_not_wait": 20,
    "reservation_ignored": 250,
    "restarts_not_counted": 84,
    "resume_point_fixed_per_call": 84,
    "role_outlives_its_job": 10,
    "settled_time_counted_twice": 10,
    "signature_not_checked": 60,
    "stale_progress_counts": 20,
    "status_written_without_version": 10,
    "stopped_leader_writes": 20,
    "success_not_looked_for": 80,
    "taint_lifted_by_time": 100,
    "taint_without_owner": 30,
    "usage_freed_with_the_attempt": 10,
    "victim_preempted_twice": 90,
}
"""Seeds, from 0 on, within which each of these must be seen."""
OF_HEALTH = frozenset(
    {
        "breaker_charged_without_version",
        "breaker_forgets_charges",
        "examination_looks_at_nothing",
        "foreign_taint_dropped",
        "incident_named_by_the_clock",
        "node_tainted_without_a_charge",
        "taint_lifted_by_time",
        "taint_without_owner",
    }
)
"""Bugs that only seeds with a NodeFaultPolicy can see."""

CLASS_OF = {
    "lease_lost_with_its_owner": "forged records",
    "older_record_counts": "forged records",
    "priority_max_ignored": "foreign queues",
    "refused_child_counts_as_created": "refused children",
    "refused_child_tried_too_late": "refused children",
    "refused_job_waits": "foreign queues",
    "signature_not_checked": "forged records",
}
"""Anomalies that a bug needs: the simulator makes them in each of its seeds, whatever the seed says."""

_REPLAYED = re.compile(r"^seed (?P<seed>\d+): trace .* (?P<violations>\d+) violations$", re.MULTILINE)


def patch_file(bug: str) -> Path:
    """Return the file of a bug's patch."""
    return PLANTED / f"{bug}.patch"


def plant(bug: str, directory: Path) -> None:
    """Plant a bug on a copy of the sources, into an empty directory. What was compiled goes along."""
    for root, package in SOURCES:
        shutil.copytree(ROOT / root / package, directory / root / package)
    subprocess.run(["git", "apply", str(patch_file(bug))], cwd=directory, check=True)


def shown_by(bug: str, directory: Path) -> int | None:
    """Return the first of a bug's own seeds that shows it, planted in a directory; None if none does."""
    seeds = [str(seed) for seed in SHOWN_BY.get(bug, ())]
    if not seeds:
        return None
    said = _simulate(directory, "--seed", *seeds, "--until-violation", *_kind(bug))
    return next((int(found["seed"]) for found in _REPLAYED.finditer(said) if found["violations"] != "0"), None)


def first_caught(bug: str, directory: Path, *, processes: int = 1, health: bool = False) -> int | None:
    """Return how many seeds it takes to see a bug that is planted in a directory; None if all within its bound miss it.

    Args:
        bug: Which.
        directory: Where it is planted.
        processes: Processes to use.
        health: Whether nodes have agents and a policy, though the bug does not need them.
    """
    flags = _kind(bug, health=health)
    seeds = ("--seeds", str(CAUGHT_WITHIN[bug]), "--processes", str(processes), "--until-violation", *flags)
    figures: dict[str, Any] = json.loads(_simulate(directory, *seeds).splitlines()[-1])["figures"]
    return int(figures["seeds"]) if figures["violations"] else None


def _kind(bug: str, *, health: bool = False) -> tuple[str, ...]:
    anomaly = ("--anomaly", CLASS_OF[bug]) if bug in CLASS_OF else ()
    return (*anomaly, "--health") if health or bug in OF_HEALTH else anomaly


def _simulate(directory: Path, *arguments: str) -> str:
    path = os.pathsep.join(str(directory / root) for root, _ in SOURCES)
    return subprocess.run(
        [sys.executable, "-m", "polyreme_simulator", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
