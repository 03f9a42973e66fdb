"""The domains say the same as a look at each node, whatever came and went, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.fault_policy import EvacuationRule
from polyreme_api.faults.table import FaultRow
from polyreme_operator.health.domains import (
    NODES_MIN,
    Domain,
    DomainKey,
    concerned,
    condition_of,
    domains_of,
    with_domains,
)
from polyreme_operator.health.policy import Answer, Judged, PolicyView
from polyreme_operator.health.record import NodeState, Record
from polyreme_operator.health.signs import Reading, Sign

WINDOW_S = 60.0
LINK = FaultRow(code="LinkDowned", fault_class="network-link", action="Replace")
NODES = [f"n{at}" for at in range(8)]
Nodes = dict[str, tuple[str, float | None]]
"""Rack of each node, and since when it shows the fault."""


def policy_of(percent: int) -> PolicyView:
    rule = EvacuationRule(
        name="rack", level="rack", fault_classes=["network-link"], nodes_percent=percent, window_seconds=int(WINDOW_S)
    )
    return PolicyView(name="p", enforce=True, classes=frozenset(rule.fault_classes), evacuations=(rule,))


def key_of(rack: str) -> DomainKey:
    return DomainKey("p", "rack", (rack,))


def judged(since_s: float | None) -> list[Judged]:
    if since_s is None:
        return []
    sign = Sign(row=LINK, condition="polyreme.dev/Network", since_s=since_s)
    return [Judged(sign=sign, answer=Answer.DRAIN, fault_class="network-link", enforced=True)]


def fires(nodes: Nodes, rack: str, percent: int) -> bool:
    members = [since_s for its, since_s in nodes.values() if its == rack]
    times_s = [since_s for since_s in members if since_s is not None]
    least = max(NODES_MIN, -(-len(members) * percent // 100))
    return any(sum(at_s <= other_s <= at_s + WINDOW_S for other_s in times_s) >= least for at_s in times_s)


@given(st.data())
def test_domains_agree_with_a_look_at_each_node(data: st.DataObject) -> None:
    percent = data.draw(st.integers(1, 100), label="percent")
    policies, nodes, domains = {"p": policy_of(percent)}, Nodes(), dict[DomainKey, Domain]()
    for _ in range(data.draw(st.integers(1, 25), label="changes")):
        name = data.draw(st.sampled_from(NODES), label="node")
        faulty = {rack for rack in "ab" if fires(nodes, rack, percent)}
        if data.draw(st.integers(0, 5), label="removed") == 0:
            nodes.pop(name, None)
        else:
            rack = data.draw(st.sampled_from("ab"), label="rack")
            since_s = data.draw(st.none() | st.sampled_from([0.0, 30.0, 61.0, 500.0]), label="since")
            nodes[name] = (rack, since_s)
        before, domains = (
            domains,
            domains_of(((name, [key_of(rack)], judged(since_s)) for name, (rack, since_s) in nodes.items()), policies),
        )
        touched = concerned(before, domains)
        for other, (rack, since_s) in nodes.items():
            found = with_domains(other, Reading(), domains, [key_of(rack)], None)
            assert bool(found.signs) == (since_s is None and fires(nodes, rack, percent))
            if fires(nodes, rack, percent) != (rack in faulty):
                assert other in touched | {name}, "who is concerned is decided about"
        out = Record(state=NodeState.QUARANTINED, condition=condition_of("rack"))
        for other in nodes:
            reading = with_domains(other, Reading(), domains, [key_of(nodes[other][0])], out)
            assert bool(reading.signs) != (condition_of("rack") in reading.clear), "it stays or is clear, never both"
