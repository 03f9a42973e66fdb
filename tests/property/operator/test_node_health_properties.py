"""Node health under any order of signs, silence, releases and hands: what holds in every state."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.faults.table import FaultRow
from polyreme_operator.health.breaker import BreakerState, grant, settled
from polyreme_operator.health.record import RECORD_BYTES_MAX, NodeState, parse, render
from polyreme_operator.health.signs import Reading
from tests.unit.operator.node_health_scenes import BLIND, BUS, FLAP, POLICY, Node, bus_sign, shown

LONG_S = 8 * 86_400.0
ROWS = (BUS, FLAP, FaultRow(code="Xid48", fault_class="gpu-lost", action="Reset", fatal=True, sticky_s=9_000.0))
SIGNS = st.builds(
    lambda row, device, count, boot, at_s: bus_sign(row=row, device=device, count=count, boot=boot, at_s=at_s),
    st.sampled_from(ROWS),
    st.text(max_size=128),
    st.integers(1, 10**9),
    st.text(max_size=64),
    st.floats(0, 1e9),
)
READINGS = st.one_of(st.just(shown()), st.just(BLIND), st.lists(SIGNS, max_size=8).map(lambda signs: shown(*signs)))
POLICIES = st.sampled_from((None, POLICY, dataclasses.replace(POLICY, enforce=False)))
STEPS = st.lists(
    st.tuples(
        READINGS, POLICIES, st.integers(0, 3), st.booleans(), st.sampled_from(("", "lift", "taint")), st.floats(0, 2e5)
    ),
    max_size=12,
)


@given(STEPS)
def test_every_taint_has_an_owner_and_an_examination_and_is_lifted_only_by_one_or_by_a_person(steps) -> None:  # type: ignore[no-untyped-def]
    node, now_s = Node(), 1.0
    for reading, policy, workers, granted, hand, later_s in steps:
        now_s += later_s
        node.now(reading=reading, policy=policy, workers=workers)
        if hand:
            node.now(tainted=hand == "taint")
        was_out, before = node.facts.tainted and node.record.state.is_out, node.record
        step = node.step(now_s, granted=granted)
        record = node.record
        if record.state.is_out:
            assert record.owner
            assert record.examine_at_s > now_s
            assert step.wake_at_s is not None
        if was_out and not record.state.is_out:
            assert now_s >= before.examine_at_s
            assert not any(each.grave for each in step.judged)
            assert reading == shown() or not before.condition
        if node.facts.record is not None:
            text = render(record)
            assert len(text) <= RECORD_BYTES_MAX
            assert parse(text) == (record, "")
        assert node.step(now_s).record == node.facts.record


@given(STEPS)
def test_no_healthy_node_stays_out_for_ever(steps) -> None:  # type: ignore[no-untyped-def]
    node, now_s = Node(), 1.0
    for reading, policy, workers, granted, _, later_s in steps:
        now_s += later_s
        node.now(reading=reading, policy=policy, workers=workers)
        node.step(now_s, granted=granted)
    if node.record.state is NodeState.RETIRED:
        node.now(tainted=False)
    node.now(reading=Reading(clear=shown().clear), policy=POLICY, workers=0)
    for _ in range(4):
        node.step(now_s)
        now_s = max(now_s, node.record.examine_at_s)
    assert not node.record.state.is_out
    for _ in range(3):
        now_s += LONG_S * 3
        node.step(now_s)
    assert node.facts.record is None


DEMANDS = st.lists(
    st.tuples(st.sets(st.integers(0, 9), max_size=6), st.booleans(), st.floats(0, 1e3), st.booleans()), max_size=20
)


@given(DEMANDS, st.integers(1, 4))
def test_never_more_nodes_are_out_than_the_breaker_allows(demands, limit: int) -> None:  # type: ignore[no-untyped-def]
    """Nodes come back, taints are lost between charge and write, and people reset the breaker."""
    state, out, now_s, resets = BreakerState(), set[str](), 0.0, 0
    present = [f"n{number}" for number in range(10)]
    for numbers, resets_it, later_s, crashes in demands:
        now_s, resets = now_s + later_s, resets + resets_it
        wanted = sorted(f"n{number}" for number in numbers if f"n{number}" not in out)
        out -= {node for node in sorted(out)[:1] if crashes}
        state = settled(
            state, out=out, wanted=wanted, present=present, reset=str(resets or ""), window_s=100.0, now_s=now_s
        )
        granted = grant(state, wanted, out=out, limit=limit, now_s=now_s)
        state = granted.state
        assert granted.nodes <= set(wanted)
        if not crashes:
            out |= granted.nodes
        assert len(out) <= limit
        assert not (granted.nodes and state.latched)
