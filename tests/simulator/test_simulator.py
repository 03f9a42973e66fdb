"""The simulator keeps the operator honest."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from polyreme_simulator.campaign import WRITE_FAULTS, replay, run_campaign, table
from polyreme_simulator.health_agents import FAULTS as HEALTH_FAULTS
from polyreme_simulator.run import simulate

# fmt: off
SEEDS = (
    40, 41, 42, 44, 45, 47, 57, 58, 65, 70, 73, 76, 79, 82, 85, 87, 94,
    95, 97, 100, 103, 106, 107, 108, 109, 119, 120, 121, 124, 129, 132, 135, 137, 138,
)
# fmt: on
"""About 40 s of one core: they reach all that seeds 40 to 139 do. `make soak-sim` runs more, and asks that they reach
every fault at every point."""

HEALTH_SEEDS = (6, 9, 16, 23, 31, 44, 56, 77)
"""About 10 s of one core; the last three have hooks that lie, that fail, and that are deleted. `make soak-health` runs
more."""
HEALTH_EVENTS = (
    *HEALTH_FAULTS,
    "breaker latched",
    "node draining",
    "node repairing",
    "node returned",
    "incident written",
    "node claimed",
    "repair begun",
    "hook succeeds",
    "hook fails",
    "hook hangs",
    "hook lies",
    "hook is deleted",
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_seed_breaks_a_rule_and_every_fault_and_every_write_is_struck() -> None:
    campaign = run_campaign(SEEDS, processes=os.cpu_count() or 1)
    print(table(campaign))
    assert not campaign.broken, "\n".join(map(replay, campaign.broken))
    struck = [cell for cell, count in campaign.reached.items() if count]
    unreached = [(fault, point) for fault, point in campaign.unreached if fault in WRITE_FAULTS]
    assert {fault for fault, _ in unreached} <= {fault for fault, _ in struck}, "a fault never struck"
    assert {point for _, point in unreached} <= {point for fault, point in struck if fault in WRITE_FAULTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_seed_with_faulty_nodes_breaks_a_rule() -> None:
    """With lying or silent agents, breakers, releases and hooks, the rules of nodes hold, and all others too."""
    campaign = run_campaign(HEALTH_SEEDS, processes=os.cpu_count() or 1, health=True)
    assert not campaign.broken, "\n".join(replay(result, health=True) for result in campaign.broken)
    assert [event for event in HEALTH_EVENTS if not campaign.reached.get((event, ""))] == []


@pytest.mark.slow
def test_without_faults_nothing_is_restarted() -> None:
    for seed in range(3):
        result = simulate(seed, faults=False)
        assert result.violations == ()
        assert result.restarts == 0
        assert result.succeeded


@pytest.mark.slow
def test_a_seed_replays_to_the_same_trace_in_another_process() -> None:
    command = [sys.executable, "-m", "polyreme_simulator", "--seed", "3"]
    said = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert simulate(3).trace in said[0]
