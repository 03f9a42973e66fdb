"""The policy of a node, and its answer to a sign."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from polyreme_api.fault_policy import CheckHook, EvacuationRule, RepairHook
from polyreme_operator.health.breaker import BreakerState
from polyreme_operator.health.signs import Sign

MEMBERS_NAMED_MAX = 3


class Answer(StrEnum):
    """What a policy does about a sign; a later one is graver."""

    IGNORE = "Ignore"
    WATCH = "Watch"
    TAINT = "Taint"
    DRAIN = "Drain"
    EVICT = "Evict"


GRAVITY = {answer: gravity for gravity, answer in enumerate(Answer)}
_BY_ACTION = {
    "None": Answer.IGNORE,
    "Watch": Answer.WATCH,
    "RestartApplication": Answer.WATCH,
    "Reset": Answer.DRAIN,
    "Reboot": Answer.DRAIN,
    "Replace": Answer.DRAIN,
    "Support": Answer.DRAIN,
}
"""Answer where no rule of the policy matches; an unknown action is only watched."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a policy."""

    name: str
    answer: Answer
    codes: frozenset[str] = frozenset()
    conditions: frozenset[tuple[str, str]] = frozenset()
    """Pairs of condition type and status."""
    count: int = 1
    window_s: float = 86_400.0
    fault_class: str = ""
    """Class of what it matches, in place of the table's; a code that the table lacks is only enforced with one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """A NodeFaultPolicy."""

    name: str
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    enforce: bool = False
    classes: frozenset[str] = frozenset()
    """Fault classes that are enabled: in all others it only observes."""
    selector: tuple[tuple[str, str], ...] = ()
    rules: tuple[Rule, ...] = ()
    evacuations: tuple[EvacuationRule, ...] = ()
    nodes_percent: int = 10
    window_s: float = 300.0
    reset: str = ""
    examine_s: float = 300.0
    """Time from a taint to its first examination."""
    probation_s: float = 3_600.0
    loaded_s: float = 0.0
    """Time under load that ends a probation; 0: ``probation_s`` does, and any job may use the node."""
    probation_max_s: float = 86_400.0
    hooks: tuple[RepairHook, ...] = ()
    check: CheckHook | None = None
    settle_s: float = 600.0
    """How long after a repair the fault may still be shown."""
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """As it was last written."""
    breaker: BreakerState = dataclasses.field(default=BreakerState(), compare=False)
    """What that status says of the breaker."""

    def selects(self, tags: Mapping[str, str]) -> bool:
        """Tell whether the policy is for a node with these labels."""
        return all(tags.get(name) == value for name, value in self.selector)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A sign with the answer of a policy."""

    sign: Sign
    answer: Answer
    fault_class: str
    enforced: bool
    """Whether the answer is carried out; otherwise it is only counted."""
    rule: str = ""
    """The rule that decided; empty: the fault table."""

    @property
    def grave(self) -> bool:
        """Whether the answer takes the node out of service."""
        return GRAVITY[self.answer] >= GRAVITY[Answer.TAINT]


def policy_of(tags: Mapping[str, str], policies: Sequence[PolicyView]) -> tuple[PolicyView | None, tuple[str, ...]]:
    """Return the policy of a node, and the names of all policies that select it: with two, none is in force."""
    found = [policy for policy in policies if policy.selects(tags)]
    return (found[0] if len(found) == 1 else None), tuple(policy.name for policy in found)


def overlap_message(name: str, others: Sequence[str], nodes: Sequence[str]) -> str:
    """Return the sentence by which a policy reports nodes that another policy selects too."""
    named = ", ".join(sorted(nodes)[:MEMBERS_NAMED_MAX])
    more = f" and {len(nodes) - MEMBERS_NAMED_MAX} more" if len(nodes) > MEMBERS_NAMED_MAX else ""
    return (
        f"nodes {named}{more} are also selected by {', '.join(sorted(set(others) - {name}))}: no policy acts on them; "
        "change spec.nodeSelector so that each node has one policy"
    )


def judge(sign: Sign, policy: PolicyView | None, now_s: float) -> Judged:
    """Return the answer of a policy to a sign; without a policy, that of the fault table, not carried out."""
    if policy is not None:
        if sign.rule:
            rule = next(each for each in policy.evacuations if each.name == sign.rule)
            enforced = policy.enforce and policy.classes.issuperset(rule.fault_classes)
            answer = Answer(rule.action)
            return Judged(sign=sign, answer=answer, fault_class=sign.row.fault_class, enforced=enforced, rule=rule.name)
        for own in policy.rules:
            if _matches(own, sign):
                answer = own.answer
                if GRAVITY[answer] > GRAVITY[Answer.WATCH] and not _reached(sign, own.count, own.window_s, now_s):
                    answer = Answer.WATCH
                return _judged(sign, answer, own.fault_class or sign.row.fault_class, policy, rule=own.name)
    answer = _BY_ACTION.get(sign.row.action, Answer.WATCH) if sign.known else Answer.IGNORE
    if GRAVITY[answer] > GRAVITY[Answer.WATCH] and not _reached(sign, sign.row.count, sign.row.window_s, now_s):
        answer = Answer.WATCH
    return _judged(sign, answer, sign.row.fault_class, policy)


def _judged(sign: Sign, answer: Answer, fault_class: str, policy: PolicyView | None, *, rule: str = "") -> Judged:
    enforced = policy is not None and policy.enforce and fault_class in policy.classes
    return Judged(sign=sign, answer=answer, fault_class=fault_class, enforced=enforced, rule=rule)


def _matches(rule: Rule, sign: Sign) -> bool:
    return sign.row.code in rule.codes or (sign.condition, sign.status) in rule.conditions


def _reached(sign: Sign, count: int, window_s: float, now_s: float) -> bool:
    if sign.count < count:
        return False
    # A sign that still holds counts; only a threshold of several needs to know when.
    return count <= 1 or window_s <= 0.0 or not sign.last_s or now_s - sign.last_s <= window_s
