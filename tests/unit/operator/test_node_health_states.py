"""States of a node: what takes it out of service, what brings it back, and what escalates."""

from __future__ import annotations

import dataclasses

import pytest

from polyreme_operator.health.record import Leave, NodeState, Record, parse, render
from polyreme_operator.health.states import PERSONS_EXAMINE_S, quarantined_by, released_by
from tests.unit.operator.node_health_scenes import BLIND, BUS, FLAP, POLICY, Node, bus_sign, shown

DAY_S = 86_400.0


def test_a_fault_quarantines_its_node_with_owner_reason_and_next_examination() -> None:
    node = Node(reading=shown(bus_sign(at_s=100.0)), workers=2)
    step = node.step(100.0)
    record = node.record
    assert step.needs_charge
    assert step.out
    assert (record.state, record.owner, record.fault_class) == (NodeState.DRAINING, "policy/gpus", "gpu-lost")
    assert (record.reason, record.action, record.leave) == ("Xid79", "Reboot", Leave.DRAIN)
    assert record.examine_at_s == 400.0
    assert [note.reason for note in step.notes] == ["NodeQuarantined"]
    assert parse(render(record)) == (record, "")


def test_the_same_evidence_changes_nothing_again() -> None:
    node = Node(reading=shown(bus_sign(at_s=100.0)))
    node.step(100.0)
    assert not node.step(101.0).changed


@pytest.mark.parametrize(
    "policy",
    [None, dataclasses.replace(POLICY, enforce=False), dataclasses.replace(POLICY, classes=frozenset({"kernel"}))],
)
def test_without_an_enabled_class_it_is_only_counted(policy: object) -> None:
    node = Node(reading=shown(bus_sign()), policy=policy)
    step = node.step(100.0)
    assert not step.changed
    assert step.record is None
    assert step.gravest is not None
    assert not step.gravest.enforced


def test_what_the_breaker_refuses_stays_in_service_and_is_asked_again() -> None:
    node = Node(reading=shown(bus_sign()))
    node.step(100.0, granted=False)
    assert not node.record.state.is_out
    assert node.step(200.0).needs_charge


def test_a_drained_node_waits_for_its_repair_unless_the_breaker_is_latched() -> None:
    node = Node(reading=shown(bus_sign()), workers=1)
    node.step(100.0)
    node.now(workers=0, latched=True)
    node.step(110.0)
    waits = node.record.state
    node.now(latched=False)
    node.step(120.0)
    assert (waits, node.record.state) == (NodeState.QUARANTINED, NodeState.REPAIRING)


def test_time_alone_lifts_nothing() -> None:
    node = Node(reading=shown(bus_sign()))
    node.step(0.0)
    for reading in (shown(bus_sign()), BLIND):
        node.now(reading=reading)
        for _ in range(20):
            node.step(node.record.examine_at_s)
            assert node.record.state.is_out
    assert node.record.examinations == 40


def test_a_clear_examination_brings_it_back_in_probation_and_then_to_health() -> None:
    node = Node(reading=shown(bus_sign()))
    node.step(0.0)
    node.now(reading=shown())
    assert not node.step(299.0).changed
    node.step(300.0)
    assert node.record.state is NodeState.PROBATION
    assert node.record.risk >= 0.5
    node.step(300.0 + POLICY.probation_s)
    assert node.record.state in {NodeState.HEALTHY, NodeState.AT_RISK}


def test_the_third_recurrence_in_probation_retires_it_until_a_person_releases_it() -> None:
    node, now_s = Node(), 0.0
    for time in range(4):
        node.now(reading=shown(bus_sign(boot=f"b{time}", at_s=now_s)))
        node.step(now_s)
        assert (node.record.state is NodeState.RETIRED) == (time == 3)
        node.now(reading=shown())
        now_s = node.record.examine_at_s
        node.step(now_s)
        now_s += 10.0
    assert node.record.state is NodeState.RETIRED
    node.now(tainted=False)
    node.step(now_s)
    assert not node.record.state.is_out


def test_five_fatal_errors_of_one_device_ask_for_a_replacement() -> None:
    node = Node(reading=shown(bus_sign(count=5)))
    node.step(0.0)
    assert node.record.action == "Replace"
    spread = Node(reading=shown(*(bus_sign(device=f"GPU-{at}") for at in range(5))))
    spread.step(0.0)
    assert spread.record.action == "Reboot"


def test_a_sticky_fault_is_not_lifted_before_its_window_ends() -> None:
    sticky = dataclasses.replace(BUS, sticky_s=3 * 3_600.0)
    node = Node(reading=shown(bus_sign(at_s=50.0, row=sticky)))
    node.step(100.0)
    assert node.record.examine_at_s == 50.0 + 3 * 3_600.0


def test_a_removed_taint_is_a_release_and_old_evidence_does_not_count_again() -> None:
    node = Node(reading=shown(bus_sign(count=2)))
    node.step(0.0)
    node.now(tainted=False)
    step = node.step(10.0)
    assert [note.reason for note in step.notes] == ["NodeReleased"]
    assert node.record.released is not None
    assert not node.step(20.0).needs_charge
    node.now(reading=shown(bus_sign(count=3)))
    assert node.step(30.0).needs_charge


def test_a_fault_that_was_released_counts_again_after_it_was_gone() -> None:
    node = Node(reading=shown(bus_sign()))
    node.step(0.0)
    node.now(tainted=False)
    node.step(10.0)
    node.now(reading=shown())
    node.step(20.0)
    node.now(reading=shown(bus_sign()))
    assert node.step(30.0).needs_charge


def test_a_taint_by_hand_is_a_persons_and_only_they_lift_it() -> None:
    node = Node(tainted=True)
    node.step(0.0)
    assert (node.record.owner, node.record.examine_at_s) == ("person", PERSONS_EXAMINE_S)
    node.step(PERSONS_EXAMINE_S)
    assert node.record.examine_at_s == 2 * PERSONS_EXAMINE_S
    assert node.record.state.is_out


def test_a_persons_quarantine_ends_with_its_time_if_the_node_is_well() -> None:
    record = quarantined_by(Record(), who="ada", reason="new cable", until_s=500.0, leave=Leave.DRAIN, at_s=0.0)
    node = Node(record=record, tainted=True, reading=shown(bus_sign()))
    node.step(500.0)
    assert node.record.state.is_out
    node.now(reading=shown())
    node.step(node.record.examine_at_s)
    assert node.record.state is NodeState.HEALTHY


def test_a_broken_annotation_is_reported_and_never_trusted() -> None:
    node = Node(tainted=True, broken="annotation polyreme.dev/health can't be read: ...")
    step = node.step(0.0)
    assert [note.reason for note in step.notes] == ["NodeHealthUnreadable"]
    assert (node.record.owner, node.record.reason) == ("operator", "RecordUnreadable")
    node.step(node.record.examine_at_s)
    assert not node.record.state.is_out


def test_watched_faults_raise_the_risk_which_decays() -> None:
    node = Node(reading=shown(bus_sign(row=FLAP)))
    node.step(0.0)
    first = node.record.risk
    assert first > 0.0
    node.now(reading=shown(bus_sign(row=FLAP, count=200)))
    node.step(60.0)
    assert node.record.risk > first
    assert node.record.state is NodeState.AT_RISK
    node.now(reading=shown())
    node.step(20 * DAY_S)
    assert node.record.risk == 0.0
    node.step(28 * DAY_S)
    assert node.facts.record is None


def test_a_release_by_command_acknowledges_what_the_node_shows() -> None:
    node = Node(reading=shown(bus_sign()))
    node.step(0.0)
    node.now(record=released_by(node.record, node.facts.reading.signs, who="ada", reason="swapped", at_s=5.0))
    node.now(tainted=False)
    assert not node.step(6.0).changed
