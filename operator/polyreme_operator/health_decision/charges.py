"""Charges to a policy's breaker, before any node is tainted, and the policy's status."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef
from polyreme_operator.health import breaker
from polyreme_operator.health.breaker import BreakerState
from polyreme_operator.health.domains import Domain, DomainKey, idle_rules, too_large
from polyreme_operator.health.policy import PolicyView, overlap_message
from polyreme_operator.health.status import StatusFacts, patch_of
from polyreme_operator.health_decision.snapshot import Grant, PolicyWrite, Seen, Snapshot
from polyreme_operator.types.actions import EmitEvent

STATUS_EVERY_S = 1.0
"""Shortest time between two writes of a policy's status that only inform."""
DOMAIN_LOOK_S = 30.0
"""How often it is looked whether there is room to take a faulty domain out of service."""


def grant(
    policy: PolicyView,
    wanted: Mapping[str, DomainKey | None],
    nodes: Mapping[str, Seen],
    domains: Mapping[DomainKey, Domain],
    snapshot: Snapshot,
) -> Grant:
    """Decide which nodes a policy takes out.

    Args:
        policy: The policy.
        wanted: Nodes to take out, each with the domain with which it goes; None: for a fault of its own.
        nodes: All nodes that the policy selects.
        domains: All domains.
        snapshot: What else is known.
    """
    now_s, before, stored = snapshot.now_s, snapshot.memory.grants.get(policy.name, Grant()), policy.breaker
    out, limit = nodes.keys() & snapshot.tainted, breaker.limit_of(len(nodes), policy.nodes_percent)
    state = breaker.settled(
        stored,
        out=out,
        wanted=wanted,
        present=snapshot.present,
        reset=policy.reset,
        window_s=policy.window_s,
        now_s=now_s,
    )
    chosen, large = _fitting(state, wanted, out=out, limit=limit, now_s=now_s)
    found = breaker.grant(state, sorted(chosen), out=out, limit=limit, now_s=now_s)
    taken = {wanted[name] for name in chosen}
    known = {key for key in before.too_large if key in domains and domains[key].fires}
    events = tuple(
        _event(
            policy,
            "DomainTooLarge",
            too_large(key, group, out=len(out), limit=limit),
            f"{key.slug}-{int(now_s)}",
        )
        for key, group in large.items()
        if key not in known
    )
    stay = {**dict.fromkeys(known - taken, ()), **large}
    write, current, status_at_s = None, before.current, before.status_at_s
    if found.state.charges != stored.charges or found.state.latched != stored.latched or status_at_s <= now_s:
        facts = _facts(policy, found.state, limit, nodes, snapshot)
        patch = patch_of(facts, current, now_s)
        status_at_s = now_s + STATUS_EVERY_S
        current = None if patch else facts
        latches = found.state.latched and not stored.latched
        event = _event(policy, "BreakerLatched", found.state.message, f"latched-{int(now_s)}") if latches else None
        write = PolicyWrite(policy=policy, patch=patch, nodes=tuple(wanted), event=event) if patch else None
    return Grant(
        nodes=found.nodes, write=write, current=current, status_at_s=status_at_s, too_large=stay, events=events
    )


def _fitting(
    state: BreakerState,
    wanted: Mapping[str, DomainKey | None],
    *,
    out: Collection[str],
    limit: int,
    now_s: float,
) -> tuple[set[str], dict[DomainKey, tuple[str, ...]]]:
    """Return the nodes to charge: those with a fault of their own, and each faulty domain that fits in whole.

    The second part of the answer is the domains that do not fit, with their nodes.
    """
    chosen, large = {name for name, key in wanted.items() if key is None}, {}
    for key in dict.fromkeys(key for _, key in sorted(wanted.items()) if key is not None):
        group = tuple(sorted(name for name, its in wanted.items() if its == key))
        whole = breaker.grant(state, [*chosen, *group], out=out, limit=limit, now_s=now_s)
        if whole.state.latched and not state.latched:
            large[key] = group
        else:
            chosen.update(group)
    return chosen, large


def _facts(
    policy: PolicyView, state: BreakerState, limit: int, nodes: Mapping[str, Seen], snapshot: Snapshot
) -> StatusFacts:
    overlapping = {name for name, seen in nodes.items() if len(seen.policies) > 1}
    others = {other for name in overlapping for other in nodes[name].policies}
    return StatusFacts(
        policy=policy,
        nodes=tuple(nodes[name].summary for name in sorted(nodes)),
        breaker=state,
        limit=limit,
        overlap=overlap_message(policy.name, sorted(others), sorted(overlapping)) if overlapping else "",
        idle_rules=idle_rules(policy, [name for name, _ in snapshot.levels]),
        repairs=snapshot.limits.repairs,
    )


def _event(policy: PolicyView, reason: str, message: str, key: str) -> EmitEvent:
    ref = ObjectRef(kind=labels.KIND_FAULT_POLICY, name=policy.name)
    return EmitEvent(ref=ref, uid=policy.uid, reason=reason, message=message, warning=True, key=key)
