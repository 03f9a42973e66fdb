"""Faults of a whole domain: where so many nodes of a rack fail together, what they share has failed, such as a switch.

An evacuation rule of a policy says when. The other nodes of the domain then have a sign of their own, which is answered
as the rule says, and gone as soon as fewer nodes show the fault.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from polyreme_api.fault_policy import EvacuationRule
from polyreme_api.faults.table import FaultRow
from polyreme_operator.health.policy import GRAVITY, Answer, Judged, PolicyView
from polyreme_operator.health.record import Record
from polyreme_operator.health.signs import DOMAIN_FAULT, Reading, Sign

NODES_MIN = 3
"""Fewer nodes that fail together are never a fault of their domain."""
NAME_CHARACTERS_MAX = 128


class DomainKey(NamedTuple):
    """A domain as one rule of one policy sees it."""

    policy: str
    rule: str
    path: tuple[str, ...]
    """Values of the topology's labels, from the top down to the rule's level."""

    @property
    def name(self) -> str:
        """Name for people."""
        return "/".join(self.path)[:NAME_CHARACTERS_MAX]

    @property
    def slug(self) -> str:
        """Part of the names of objects about it."""
        return f"domain-{zlib.crc32('/'.join((self.rule, *self.path)).encode()):08x}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The nodes of a domain, and which of them show its fault."""

    rule: EvacuationRule
    members: frozenset[str]
    shown_s: Mapping[str, float]
    """By node that shows the fault itself: when it last occurred."""

    @property
    def least(self) -> int:
        """How many nodes must show the fault."""
        return max(NODES_MIN, -(-len(self.members) * self.rule.nodes_percent // 100))

    @property
    def holds(self) -> bool:
        """Whether so many nodes show the fault, whenever it began."""
        return len(self.shown_s) >= self.least

    @property
    def fires(self) -> bool:
        """Whether so many began to show it together."""
        times_s = sorted(self.shown_s.values())
        pairs = zip(times_s, times_s[self.least - 1 :], strict=False)
        return any(last_s - first_s <= self.rule.window_seconds for first_s, last_s in pairs)


def keys_of(policy: PolicyView | None, tags: Mapping[str, str], levels: Sequence[tuple[str, str]]) -> list[DomainKey]:
    """Return the domains that a node belongs to, one for each evacuation rule.

    Args:
        policy: The one policy that selects the node.
        tags: Its labels.
        levels: Name and label of the topology's levels, top to bottom.
    """
    found = []
    for rule in () if policy is None else policy.evacuations:
        depth = next((at for at, (name, _) in enumerate(levels, start=1) if name == rule.level), 0)
        path = tuple(tags.get(label, "") for _, label in levels[:depth])
        if policy is not None and path and all(path):
            found.append(DomainKey(policy.name, rule.name, path))
    return found


def idle_rules(policy: PolicyView, levels: Collection[str]) -> str:
    """Return a sentence about the evacuation rules of a policy that can do nothing; empty: there are none.

    Args:
        policy: The policy.
        levels: Names of the topology's levels.
    """
    found = []
    for rule in policy.evacuations:
        if rule.level not in levels:
            known = ", ".join(levels) or "none"
            found.append(f"evacuation rule {rule.name} names level {rule.level}, known levels are: {known}")
        elif lacking := sorted(set(rule.fault_classes) - policy.classes):
            found.append(f"evacuation rule {rule.name} only observes until spec.classes has {', '.join(lacking)} too")
    return "; ".join(found)


def condition_of(rule: str) -> str:
    """Return what a record names as its condition while a rule keeps the node out."""
    return f"{DOMAIN_FAULT}/{rule}"


def domains_of(
    nodes: Iterable[tuple[str, Sequence[DomainKey], Sequence[Judged]]], policies: Mapping[str, PolicyView]
) -> dict[DomainKey, Domain]:
    """Return all domains.

    Args:
        nodes: Name of each node, the domains that it belongs to, and what it shows itself.
        policies: By name.
    """
    members: dict[DomainKey, list[tuple[str, Sequence[Judged]]]] = defaultdict(list)
    for name, keys, judged in nodes:
        for key in keys:
            members[key].append((name, judged))
    found = {}
    for key, shows in members.items():
        policy = policies.get(key.policy)
        rule = next((each for each in policy.evacuations if each.name == key.rule), None) if policy else None
        if rule is not None:
            times_s = {name: _shown_s(rule, judged) for name, judged in shows if judged}
            shown_s = {name: at_s for name, at_s in times_s.items() if at_s is not None}
            found[key] = Domain(rule=rule, members=frozenset(name for name, _ in shows), shown_s=shown_s)
    return found


def _shown_s(rule: EvacuationRule, judged: Sequence[Judged]) -> float | None:
    seen = (each for each in judged if GRAVITY[each.answer] >= GRAVITY[Answer.WATCH])
    return max((each.sign.at_s for each in seen if each.fault_class in rule.fault_classes), default=None)


def concerned(before: Mapping[DomainKey, Domain], after: Mapping[DomainKey, Domain]) -> set[str]:
    """Return the nodes that must be decided about, since a domain of theirs is faulty, or was, and has changed."""
    found: set[str] = set()
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old != new and any(each is not None and each.fires for each in (old, new)):
            found |= new.members if new is not None else old.members if old is not None else frozenset()
    return found


def with_domains(
    node: str, reading: Reading, domains: Mapping[DomainKey, Domain], keys: Iterable[DomainKey], record: Record | None
) -> Reading:
    """Return a node's reading with the faults of its domains, and with those rules as clear that find none."""
    found: list[Sign] = []
    stays = record.condition if record is not None and record.state.is_out else ""
    for key in keys:
        domain = domains.get(key)
        if domain is None or node in domain.shown_s:
            continue
        if domain.fires or (stays == condition_of(key.rule) and domain.holds):
            found.append(_sign(key, domain))
    clear = {stays} if stays.startswith(f"{DOMAIN_FAULT}/") else set()
    clear -= {sign.condition for sign in found}
    if not found and not clear:
        return reading
    return dataclasses.replace(reading, signs=(*reading.signs, *found), clear=reading.clear | clear)


def too_large(key: DomainKey, nodes: Collection[str], *, out: int, limit: int) -> str:
    """Return the sentence that reports a domain that the breaker does not allow to be taken out."""
    return (
        f"domain {key.name} is faulty by evacuation rule {key.rule}, and {len(nodes)} of its nodes stay in service: "
        f"{out} nodes are out, at most {limit} may be; raise spec.breaker.nodesPercent, or quarantine them by hand"
    )


def _sign(key: DomainKey, domain: Domain) -> Sign:
    classes = ", ".join(sorted(domain.rule.fault_classes))
    # No action: a hook would repair a node that is well.
    row = FaultRow(code=DOMAIN_FAULT, fault_class=min(domain.rule.fault_classes), action="None")
    message = f"{len(domain.shown_s)} of its {len(domain.members)} nodes show {classes}"
    return Sign(row=row, condition=condition_of(key.rule), device=key.name, message=message, rule=key.rule)
