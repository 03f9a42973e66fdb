"""Patches of a policy's status: none while nothing changes, and one for each change."""

from __future__ import annotations

import dataclasses

from polyreme_operator.health.breaker import BreakerState
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.status import NodeSummary, StatusFacts, StatusPatches


def _stored(facts: StatusFacts, patches: StatusPatches) -> StatusFacts:
    """Return the facts with the status that they ask for."""
    policy = dataclasses.replace(facts.policy, status=patches.patch_of(facts, 0.0))
    return dataclasses.replace(facts, policy=policy)


def test_a_current_status_needs_a_patch_again_when_any_fact_changes() -> None:
    patches = StatusPatches()
    first = StatusFacts(policy=PolicyView(name="p"), nodes=(NodeSummary(),), breaker=BreakerState(), limit=1)
    stored = _stored(first, patches)
    assert [patches.patch_of(stored, now_s) for now_s in (1.0, 2.0)] == [{}, {}]
    for changed in (
        {"nodes": (NodeSummary(out=True),)},
        {"breaker": BreakerState(latched=True)},
        {"limit": 2},
        {"overlap": "another policy selects n0"},
        {"idle_rules": "a rule can do nothing"},
    ):
        assert patches.patch_of(dataclasses.replace(stored, **changed), 3.0), changed
    assert patches.patch_of(stored, 4.0) == {}
    # The object's version may stay while another client's status is read: what is stored decides.
    assert patches.patch_of(first, 5.0)
