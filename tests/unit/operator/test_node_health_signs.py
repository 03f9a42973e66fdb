"""Signs of a node's conditions, the answers of its policy, and records that can't be trusted."""

from __future__ import annotations

import dataclasses
import json

import pytest

from polyreme_api.faults.table import FaultRow
from polyreme_api.node_report import NodeEvent, encode
from polyreme_operator.health.policy import Answer, PolicyView, Rule, judge, overlap_message, policy_of
from polyreme_operator.health.record import RECORD_BYTES_MAX, Record, parse, render
from polyreme_operator.health.signs import ConditionView, Reading, read_conditions
from tests.unit.operator.node_health_scenes import FLAP, GPU, POLICY, bus_sign


def _read(*conditions: ConditionView, events: tuple[NodeEvent, ...] = (), silent: bool = False) -> Reading:
    return read_conditions(conditions, events_of=lambda condition: (events, ""), silent=silent, now_s=1000.0)


def test_a_condition_without_readable_events_is_one_sign_by_its_reason() -> None:
    reading = _read(ConditionView(type=GPU, status="True", reason="Xid79"), ConditionView(type="Ready", status="True"))
    assert [(sign.row.code, sign.known, sign.count) for sign in reading.signs] == [("Xid79", True, 1)]
    assert not reading.clear


def test_impossible_counters_and_clocks_in_the_future_are_bounded() -> None:
    event = NodeEvent(code="Xid79", count=10**30, last_s=9_000_000_000, boot="b" * 999)
    sign = _read(ConditionView(type=GPU, status="True"), events=(event,)).signs[0]
    assert (sign.count, sign.last_s, len(sign.boot)) == (10**9, 1000.0, 64)


def test_an_unknown_code_is_reported_and_triggers_nothing() -> None:
    sign = _read(ConditionView(type=GPU, status="True", reason="Xid999")).signs[0]
    assert not sign.known
    assert judge(sign, POLICY, 0.0).answer is Answer.IGNORE


def test_the_drivers_own_recovery_action_outranks_the_table() -> None:
    sign = _read(ConditionView(type=GPU, status="True"), events=(NodeEvent(code="Xid79", action="Reset"),)).signs[0]
    assert sign.row.action == "Reset"


@pytest.mark.parametrize("silent", [False, True])
def test_a_silent_agent_makes_its_clear_conditions_unknown(silent: bool) -> None:
    well, kernel = ConditionView(type=GPU, status="False"), ConditionView(type="KernelDeadlock", status="False")
    reading = _read(well, kernel, silent=silent)
    assert (GPU in reading.unknown) == silent
    assert "KernelDeadlock" in reading.clear


@pytest.mark.parametrize(
    ("reason", "silent", "absent"), [("Absent", False, 1), ("Absent", True, 0), ("Failed", False, 0)]
)
def test_what_the_node_lacks_is_neither_clear_nor_unknown(reason: str, silent: bool, absent: int) -> None:
    reading = _read(ConditionView(type=GPU, status="Unknown", reason=reason), silent=silent)
    assert (len(reading.absent), len(reading.unknown), len(reading.clear)) == (absent, 1 - absent, 0)


def test_a_rule_overrides_a_row_of_the_table() -> None:
    rules = (
        Rule(name="calm", answer=Answer.IGNORE, codes=frozenset({"LinkFlap"})),
        Rule(name="twice", answer=Answer.EVICT, codes=frozenset({"Xid79"}), count=2, window_s=60.0),
    )
    policy = dataclasses.replace(POLICY, rules=rules)
    assert judge(bus_sign(row=FLAP), policy, 0.0).answer is Answer.IGNORE
    assert judge(bus_sign(), policy, 0.0).answer is Answer.WATCH
    assert judge(bus_sign(count=2, at_s=10.0), policy, 60.0).answer is Answer.EVICT
    assert judge(bus_sign(count=2, at_s=10.0), policy, 71.0).answer is Answer.WATCH
    assert judge(bus_sign(), POLICY, 0.0).answer is Answer.DRAIN


def test_a_rule_on_a_code_that_the_table_lacks_is_enforced_only_with_a_class() -> None:
    unknown = dataclasses.replace(bus_sign(row=FaultRow(code="X", fault_class="unknown", action="None")), known=False)
    rule = Rule(name="x", answer=Answer.TAINT, codes=frozenset({"X"}))
    assert not judge(unknown, dataclasses.replace(POLICY, rules=(rule,)), 0.0).enforced
    named = dataclasses.replace(rule, fault_class="kernel")
    assert judge(unknown, dataclasses.replace(POLICY, rules=(named,)), 0.0).enforced


def test_two_policies_on_one_node_are_refused_in_one_sentence() -> None:
    rack, every = PolicyView(name="rack", selector=(("rack", "a"),)), PolicyView(name="every")
    assert policy_of({"rack": "b"}, [rack, every]) == (every, ("every",))
    assert policy_of({"rack": "a"}, [rack, every]) == (None, ("rack", "every"))
    assert overlap_message("rack", ["rack", "every"], ["n4", "n1", "n2", "n3"]) == (
        "nodes n1, n2, n3 and 1 more are also selected by every: no policy acts on them; change spec.nodeSelector so "
        "that each node has one policy"
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "[" * 5_000,
        json.dumps({"version": 2}),
        json.dumps({"version": 1, "state": "gone"}),
        json.dumps({"version": 1, "riskS": 1, "risk": "NaN"}),
        json.dumps({"version": 1, "sinceS": "yesterday"}),
        json.dumps({"version": 1, "fatalS": {"d": [0.0] * 1_000, "e": "x"}}),
        "x" * (RECORD_BYTES_MAX + 1),
    ],
)
def test_foreign_text_is_no_record(text: str) -> None:
    record, why = parse(text)
    assert record is None
    assert why
    assert len(why) < 600


def test_no_text_is_no_record_and_a_whole_one_reads_back() -> None:
    assert parse(None) == (None, "")
    assert parse(render(Record())) == (Record(), "")


def test_the_agents_messages_are_read_with_the_shipped_table() -> None:
    message = encode("a sentence", [NodeEvent(code="Xid79", device="0000:3b:00", count=2, last_s=900, action="Reset")])
    conditions = (
        ConditionView(type=GPU, status="True", reason="Xid79", message=message),
        ConditionView(type="polyreme.dev/Network", status="True", reason="LinkDowned", message="x" * 1_000_000),
        ConditionView(type="polyreme.dev/Agent", status="False", reason="Works", message="a sentence"),
        ConditionView(type="KernelDeadlock", status="True", reason="DockerHung", message="two\nlines"),
    )
    reading = read_conditions(conditions, silent=False, now_s=1000.0)
    assert [(sign.row.fault_class, sign.row.action, sign.count, sign.known) for sign in reading.signs] == [
        ("kernel", "Reboot", 1, True),
        ("gpu-lost", "Reset", 2, True),
        ("network-link", "Replace", 1, True),
    ]
    assert reading.problems == (
        "condition polyreme.dev/Network: its message has more than 1024 characters, so no event of it is read",
    )
