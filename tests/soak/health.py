"""``make soak-health``: many seeds with node agents, faults of nodes and a policy (``SEEDS=``, ``FIRST=``).

Each call takes other seeds unless ``FIRST`` names them. First every planted bug must be caught: those of node health,
and those by which an evacuation would have two gangs alive or lose a step that was committed. Nothing is resumed.
"""

from __future__ import annotations

import itertools
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme_simulator.campaign import WRITE_FAULTS
from polyreme_simulator.health_agents import FAULTS
from tests.simulator.planted_bugs import OF_HEALTH
from tests.simulator.seed_soak import seeds_asked, soak

SEEDS = 10_000
PROCESSES = 2
FIRST_MIN, FIRST_MAX = 100_000, 1 << 31
OF_GANGS = frozenset({"replacement_does_not_wait", "resume_point_fixed_per_call"})
"""Bugs that show without a NodeFaultPolicy, too: two live gangs, and a committed step that is lost."""
EVENTS = (
    *FAULTS,
    "breaker latched",
    "node draining",
    "node repairing",
    "node retired",
    "node returned",
    "node out with its rack",
)
WRITES = ("patch Node", "patch NodeFaultPolicy")
NEEDED = (*((event, "") for event in EVENTS), *itertools.product(WRITE_FAULTS, WRITES))
"""What the seeds must reach between them: every event of health, and every fault at both of its writes."""


def main() -> int:
    """Run them; 0 when no rule was broken and every bug was caught."""
    first = FIRST_MIN + secrets.randbelow(FIRST_MAX - FIRST_MIN)
    return soak(
        "health",
        seeds=seeds_asked(SEEDS, first=first),
        bugs=OF_HEALTH | OF_GANGS,
        processes=PROCESSES,
        needed=NEEDED,
        health=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
