"""Patches of a policy's status: none while nothing changes, and one for each change."""

from __future__ import annotations

import dataclasses

from polyreme_operator.health.breaker import BreakerState
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.status import NodeSummary, StatusFacts, patch_of


def _stored(facts: StatusFacts) -> StatusFacts:
    """Return the facts with the status that they ask for."""
    policy = dataclasses.replace(facts.policy, status=patch_of(facts, None, 0.0))
    return dataclasses.replace(facts, policy=policy)


def test_a_current_status_needs_a_patch_again_when_any_fact_changes() -> None:
    first = StatusFacts(policy=PolicyView(name="p"), nodes=(NodeSummary(),), breaker=BreakerState(), limit=1)
    stored = _stored(first)
    assert [patch_of(stored, known, 1.0) for known in (None, stored)] == [{}, {}]
    for changed in (
        {"nodes": (NodeSummary(out=True),)},
        {"breaker": BreakerState(latched=True)},
        {"limit": 2},
        {"overlap": "another policy selects n0"},
        {"idle_rules": "a rule can do nothing"},
    ):
        assert patch_of(dataclasses.replace(stored, **changed), stored, 3.0), changed
    assert patch_of(stored, stored, 4.0) == {}
    # The object's version may stay while another client's status is read: what is stored decides.
    assert patch_of(first, stored, 5.0)
