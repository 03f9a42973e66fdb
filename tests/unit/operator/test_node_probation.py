"""Probation under load: only jobs that accept it use the node, and it does not last forever."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from polyreme_operator.health.probation import LOOK_S
from polyreme_operator.health.record import NodeState
from polyreme_operator.health.signs import Reading
from tests.unit.operator.health_stage import HealthStage
from tests.unit.operator.node_health_scenes import BLIND, GPU, NETWORK, POLICY, Node, bus_sign, shown

HOUR_S = 3_600.0
LOADED = dataclasses.replace(POLICY, loaded_s=2 * HOUR_S, probation_max_s=24 * HOUR_S)


def in_probation() -> Node:
    """Return a node whose fault is gone since 300 s."""
    node = Node(policy=LOADED, reading=shown(bus_sign()))
    node.step(0.0)
    node.now(reading=shown())
    node.step(300.0)
    assert (node.record.state, node.record.opt_in) == (NodeState.PROBATION, True)
    return node


def follow(node: Node, now_s: float, until_s: float) -> float:
    """Decide whenever the node asks for it."""
    while now_s < until_s and node.record.state is NodeState.PROBATION:
        step = node.step(now_s)
        if step.record is None or step.record.state is not NodeState.PROBATION:
            break
        assert step.wake_at_s is not None
        now_s = max(now_s + 1.0, step.wake_at_s)
    return now_s


def test_only_time_under_load_counts() -> None:
    node = in_probation()
    now_s = follow(node, 300.0, 5 * HOUR_S)
    assert (node.record.state, node.record.loaded_s) == (NodeState.PROBATION, 0.0)
    node.now(loaded=True)
    node.step(now_s)
    end_s = follow(node, now_s, 10 * HOUR_S)
    assert node.record.state is not NodeState.PROBATION
    assert end_s - now_s == pytest.approx(2 * HOUR_S, abs=5.0)


def test_a_gap_in_which_the_operator_was_away_counts_for_one_look() -> None:
    node = in_probation()
    node.now(loaded=True)
    node.step(400.0)
    node.step(400.0 + 1.5 * HOUR_S)
    assert node.record.loaded_s == LOOK_S
    node.now(loaded=False)
    node.step(3 * HOUR_S)
    assert (node.record.loaded_s, node.record.loaded_at_s) == (LOOK_S, 0.0)


def test_a_node_that_no_job_uses_is_examined_at_last_and_returns() -> None:
    node = in_probation()
    node.now(reading=BLIND)
    follow(node, 300.0, 25 * HOUR_S)
    assert node.record.state is NodeState.PROBATION
    node.now(reading=shown())
    follow(node, 25 * HOUR_S, 27 * HOUR_S)
    assert node.record.state is not NodeState.PROBATION


def test_hardware_that_the_node_lacks_keeps_no_node_in_probation_but_a_lost_gpu_does() -> None:
    node = in_probation()
    lost = Reading(clear=frozenset({NETWORK}), absent=(GPU,))
    node.now(loaded=True, reading=lost)
    node.step(400.0)
    follow(node, 400.0, 5 * HOUR_S)
    assert node.record.state is NodeState.PROBATION
    node.now(reading=dataclasses.replace(shown(), absent=(NETWORK,)))
    follow(node, 5 * HOUR_S, 6 * HOUR_S)
    assert node.record.state is not NodeState.PROBATION


def test_a_fault_that_comes_again_is_new_also_on_a_node_that_lacks_other_hardware() -> None:
    node = in_probation()
    node.now(reading=dataclasses.replace(shown(), absent=(NETWORK,)))
    node.step(400.0)
    node.now(reading=shown(bus_sign()))
    node.step(500.0)
    assert node.record.state.is_out


def test_a_recurrence_under_load_escalates() -> None:
    node = in_probation()
    node.now(loaded=True, reading=shown(bus_sign(boot="b2")))
    node.step(500.0)
    assert (node.record.state.is_out, node.record.recurrences) == (True, 1)


def test_a_job_that_does_not_accept_it_waits_and_says_why_and_another_starts() -> None:
    stage = HealthStage(1)
    stage.add_policy(examineSeconds=5, probation={"loadedSeconds": 3600, "maxSeconds": 600})

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n0", reason="GPUMissing")
        await asyncio.sleep(2.0)
        stage.show("n0", status="False")
        await asyncio.sleep(60.0)
        record = stage.record("n0")
        assert record is not None
        assert (record.state, stage.out()) == (NodeState.PROBATION, [])
        tolerant = {"spec": {"tolerations": [{"operator": "Exists"}]}}
        stage.add_job("careful", tolerant)
        await asyncio.sleep(5.0)
        pending = stage.condition("careful", "Queued")
        assert pending["reason"] == "WaitingForNodes"
        assert "1 are in probation after a fault, and only jobs with acceptProbation use them" in pending["message"]
        stage.add_job("bold", tolerant, acceptProbation=True)
        await asyncio.sleep(5.0)
        assert stage.condition("bold", "Admitted")["status"] == "True"
        await asyncio.sleep(900.0)
        assert stage.condition("careful", "Admitted")["status"] == "True"

    stage.run(story)
