"""Faults of a whole domain: where so many nodes of a rack fail together, what they share has failed, such as a switch.

An evacuation rule of a policy says when. The other nodes of the domain then have a sign of their own, which is answered
as the rule says, and gone as soon as fewer nodes show the fault. Pure; the worker keeps one ``DomainFaults``.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from polyreme_api.faults.table import FaultRow
from polyreme_operator.health.policy import GRAVITY, Answer, EvacuationRule, Judged, PolicyView
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


@dataclasses.dataclass(slots=True)
class _Domain:
    rule: EvacuationRule
    shown_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """By node that shows the fault itself: when it last occurred."""
    members: set[str] = dataclasses.field(default_factory=set)

    @property
    def least(self) -> int:
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
        return any(last_s - first_s <= self.rule.window_s for first_s, last_s in pairs)


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
        elif lacking := sorted(rule.classes - policy.classes):
            found.append(f"evacuation rule {rule.name} only observes until spec.classes has {', '.join(lacking)} too")
    return "; ".join(found)


def condition_of(rule: str) -> str:
    """Return what a record names as its condition while a rule keeps the node out."""
    return f"{DOMAIN_FAULT}/{rule}"


class DomainFaults:
    """Which nodes of each domain show its fault."""

    def __init__(self) -> None:
        self._domains: dict[DomainKey, _Domain] = {}
        self._keys: dict[str, list[DomainKey]] = {}

    def put(
        self, node: str, policy: PolicyView | None, keys: Sequence[DomainKey], judged: Iterable[Judged]
    ) -> set[str]:
        """Note what a node shows; return the nodes that must be decided about with it."""
        judged = [each for each in judged if GRAVITY[each.answer] >= GRAVITY[Answer.WATCH]]
        touched = self._leave(node, keys)
        rules = {} if policy is None else {rule.name: rule for rule in policy.evacuations}
        for key in keys:
            rule = rules[key.rule]
            domain = self._domains.setdefault(key, _Domain(rule))
            fired, domain.rule = domain.fires, rule
            domain.members.add(node)
            times_s = [each.sign.at_s for each in judged if each.fault_class in rule.classes]
            domain.shown_s.pop(node, None)
            if times_s:
                domain.shown_s[node] = max(times_s)
            if fired or domain.fires:
                touched |= domain.members
        if keys:
            self._keys[node] = list(keys)
        return touched

    def remove(self, node: str) -> set[str]:
        """Forget a node; return the nodes that must be decided about."""
        return self._leave(node, ())

    def _leave(self, node: str, keys: Sequence[DomainKey]) -> set[str]:
        touched: set[str] = set()
        for key in set(self._keys.pop(node, ())) - set(keys):
            domain = self._domains[key]
            fired = domain.fires
            domain.members.discard(node)
            domain.shown_s.pop(node, None)
            # With fewer members fewer faulty ones are a share of them.
            if fired or domain.fires:
                touched |= domain.members
            if not domain.members:
                del self._domains[key]
        return touched - {node}

    def read(self, node: str, reading: Reading, record: Record | None) -> Reading:
        """Return a node's reading with the faults of its domains, and with those rules as clear that find none."""
        found: list[Sign] = []
        stays = record.condition if record is not None and record.state.is_out else ""
        for key in self._keys.get(node, ()):
            domain = self._domains[key]
            if node in domain.shown_s:
                continue
            if domain.fires or (stays == condition_of(key.rule) and domain.holds):
                found.append(_sign(key, domain))
        clear = {stays} if stays.startswith(f"{DOMAIN_FAULT}/") else set()
        clear -= {sign.condition for sign in found}
        if not found and not clear:
            return reading
        return dataclasses.replace(reading, signs=(*reading.signs, *found), clear=reading.clear | clear)

    def is_faulty(self, key: DomainKey) -> bool:
        """Tell whether so many nodes of a domain show its fault that it would be taken out."""
        domain = self._domains.get(key)
        return domain is not None and domain.fires

    def groups(self, rule_by_node: Mapping[str, str]) -> dict[DomainKey, list[str]]:
        """Return the nodes that are to be taken out together, by domain; each node is named with its rule."""
        groups: dict[DomainKey, list[str]] = defaultdict(list)
        for node, rule in sorted(rule_by_node.items()):
            groups[next(key for key in self._keys[node] if key.rule == rule)].append(node)
        return dict(groups)


def too_large(key: DomainKey, nodes: Collection[str], *, out: int, limit: int) -> str:
    """Return the sentence that reports a domain that the breaker does not allow to be taken out."""
    return (
        f"domain {key.name} is faulty by evacuation rule {key.rule}, and {len(nodes)} of its nodes stay in service: "
        f"{out} nodes are out, at most {limit} may be; raise spec.breaker.nodesPercent, or quarantine them by hand"
    )


def _sign(key: DomainKey, domain: _Domain) -> Sign:
    classes = ", ".join(sorted(domain.rule.classes))
    # No action: a hook would repair a node that is well.
    row = FaultRow(code=DOMAIN_FAULT, fault_class=min(domain.rule.classes), action="None")
    message = f"{len(domain.shown_s)} of its {len(domain.members)} nodes show {classes}"
    return Sign(row=row, condition=condition_of(key.rule), device=key.name, message=message, rule=key.rule)
