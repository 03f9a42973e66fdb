"""Status of a policy: what its nodes show, what it has taken out and would take out, and the state of its breaker."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

from polyreme_api.fault_policy import BreakerCharge, BreakerStatus, FaultCount, NodeFaultPolicyStatus
from polyreme_api.fields import Condition
from polyreme_api.times import rfc3339
from polyreme_operator.health.breaker import BreakerState
from polyreme_operator.health.policy import PolicyView

READY = "Ready"
SELECTS_NOTHING = "the nodeSelector {selector} matches no node: nothing is observed; change spec.nodeSelector"

NO_REPAIRS = "its repairs are not carried out, since the operator was installed without operator.repairs.enabled"


class PolicyReason(StrEnum):
    """Reasons of a policy's condition ``Ready``."""

    ENFORCING = "Enforcing"
    OBSERVING = "Observing"
    NO_CLASSES = "NoClasses"
    """It is to enforce, and no class is enabled."""
    SELECTS_NOTHING = "SelectsNothing"
    OVERLAP = "Overlap"
    """Another policy selects some of its nodes; neither acts on these."""
    BREAKER_LATCHED = "BreakerLatched"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """What one node contributes to the status of its policy."""

    classes: frozenset[str] = frozenset()
    """Classes of the faults that it shows."""
    grave: frozenset[str] = frozenset()
    """Those for which it would be taken out."""
    out: bool = False
    unknown: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """What the status of a policy is computed from."""

    policy: PolicyView
    nodes: tuple[NodeSummary, ...]
    """What each of its nodes shows."""
    breaker: BreakerState
    limit: int
    """How many nodes may be out."""
    overlap: str = ""
    """Message about nodes that other policies select too."""
    idle_rules: str = ""
    """Message about rules that can do nothing."""
    repairs: bool = True
    """Whether the operator runs its hooks."""


def patch_of(facts: StatusFacts, current: StatusFacts | None, now_s: float) -> dict[str, Any]:
    """Return the merge patch of a policy's status; empty while it is current.

    A status is looked at every second, and computing one reads every node and every charge.

    Args:
        facts: What the status is computed from.
        current: The facts with which the stored status is known to agree.
        now_s: The time.
    """
    if current is not None and current.policy is facts.policy and current == facts:
        return {}
    return difference(facts.policy.status, status_of(facts, now_s))


def status_of(facts: StatusFacts, now_s: float) -> dict[str, Any]:
    """Return the status of a policy as it is written. The time is only that of a condition that changes."""
    policy, breaker = facts.policy, facts.breaker
    no_repairs = NO_REPAIRS if policy.hooks and not facts.repairs else ""
    shown, grave = Counter[str](), Counter[str]()
    for node in facts.nodes:
        shown.update(node.classes)
        grave.update(node.grave)
    status = NodeFaultPolicyStatus(
        observed_generation=policy.generation,
        conditions=[_ready(facts, remarks=(facts.idle_rules, no_repairs), now_s=now_s)],
        nodes=len(facts.nodes),
        out_of_service=sum(node.out for node in facts.nodes),
        would_take_out=sum(bool(node.grave) and not node.out for node in facts.nodes),
        unknown=sum(node.unknown for node in facts.nodes),
        faults=[
            FaultCount(fault_class=name, nodes=count, would_take_out=grave[name])
            for name, count in sorted(shown.items())[:32]
        ],
        breaker=BreakerStatus(
            latched=breaker.latched,
            since=rfc3339(breaker.since_s) if breaker.since_s else "",
            message=breaker.message,
            limit=facts.limit,
            reset=breaker.reset,
            charges=[
                BreakerCharge(
                    node=charge.node,
                    at=rfc3339(charge.at_s),
                    released_at=rfc3339(charge.released_s) if charge.released_s else "",
                )
                for charge in breaker.charges
            ],
        ),
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _ready(facts: StatusFacts, *, remarks: Sequence[str], now_s: float) -> Condition:
    policy, breaker = facts.policy, facts.breaker
    reason, message = PolicyReason.ENFORCING, f"acts on {', '.join(sorted(policy.classes))}"
    if breaker.latched:
        reason, message = PolicyReason.BREAKER_LATCHED, breaker.message
    elif facts.overlap:
        reason, message = PolicyReason.OVERLAP, facts.overlap
    elif not facts.nodes:
        selector = ", ".join(f"{name}={value}" for name, value in policy.selector) or "(all nodes)"
        reason, message = PolicyReason.SELECTS_NOTHING, SELECTS_NOTHING.format(selector=selector)
    elif not policy.enforce:
        reason, message = PolicyReason.OBSERVING, "counts what it would do; set spec.mode to Enforce to act"
    elif not policy.classes:
        reason, message = PolicyReason.NO_CLASSES, "no class is enabled, so nothing is done; name some in spec.classes"
    message = "; ".join(filter(None, (message, *remarks)))
    truth: Literal["True", "False"] = "True" if reason in {PolicyReason.ENFORCING, PolicyReason.OBSERVING} else "False"
    entries = policy.status.get("conditions")
    known: Mapping[str, Any] = next(
        (entry for entry in (entries if isinstance(entries, list) else ()) if entry.get("type") == READY), {}
    )
    moved = known.get("status") != truth or not known.get("lastTransitionTime")
    return Condition(
        type=READY,
        status=truth,
        reason=reason.value,
        message=message,
        last_transition_time=rfc3339(now_s) if moved else known["lastTransitionTime"],
        observed_generation=policy.generation,
    )


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch from one status to another: changed fields, whole; None for removed ones."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return {**changed, **{name: None for name in before if name not in after}}
