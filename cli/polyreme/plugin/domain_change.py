"""Quarantine and release of a whole domain: every node with one label value of a level of the ClusterTopology.

Nodes are changed one after another, each as by the command for one node. A command that was interrupted is repeated:
nodes that are changed already are left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from polyreme.plugin import nodes as one
from polyreme.plugin.reading import NotAllowedError, list_all
from polyreme.views.output import nearest
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.labels import KIND_FAULT_POLICY, KIND_TOPOLOGY
from polyreme_cluster.port import ClusterPort
from polyreme_operator.health.breaker import limit_of
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import Record, parse
from polyreme_operator.types.parse_settings import parse_fault_policy, parse_topology

SHOWN_EVERY = 10
"""Nodes between two lines of progress."""
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DomainNodes:
    """The nodes of a domain."""

    level: str
    name: str
    nodes: tuple[HealthNode, ...]


async def domain_of(cluster: ClusterPort, text: str) -> DomainNodes:
    """Find the nodes of ``LEVEL=NAME``.

    Raises:
        InvalidConfigError: If the text has another form.
        NotFoundError: If there is no such level or no node with that value.
    """
    wanted, separator, value = text.partition("=")
    if not (wanted and separator and value):
        raise InvalidConfigError(f"a domain is LEVEL=NAME, such as rack=r12; seen {text!r}", field="--domain")
    parsed = (parse_topology(item) for item in await list_all(cluster, KIND_TOPOLOGY))
    levels = next((view.levels for view in parsed if view is not None), ())
    level = next((each for each in levels if wanted in (each.name, each.node_label)), None)
    if level is None:
        known = [each.name for each in levels]
        raise NotFoundError(f"the ClusterTopology has no level {wanted!r}: {nearest(wanted, known)}", field="--domain")
    found, names = [], set()
    for node in await one.read_nodes(cluster):
        own = dict(node.labels).get(level.node_label)
        names |= set() if own is None else {own}
        if own == value:
            found.append(node)
    if not found:
        said = nearest(value, sorted(names))
        raise NotFoundError(f"no node has the label {level.node_label}={value}: {said}", field="--domain")
    return DomainNodes(level=level.name, name=value, nodes=tuple(sorted(found, key=lambda node: node.name)))


async def quarantine_domain(
    cluster: ClusterPort, text: str, *, who: str, reason: str, for_s: float, evict: bool, now_s: float, tell: Tell
) -> int:
    """Take all nodes of a domain out of service; return how many were in service.

    Raises:
        InvalidConfigError: Without a reason, or if the text is no domain.
        NotFoundError: If there is no such domain.
    """
    one.check_reason(reason, "quarantine")
    domain = await domain_of(cluster, text)
    changed = [node for node in domain.nodes if not node.tainted]
    for at, node in enumerate(changed, 1):
        await one.quarantine(cluster, node.name, who=who, reason=reason, for_s=for_s, evict=evict, now_s=now_s)
        _progress(tell, at, len(changed), "out of service")
    if already := len(domain.nodes) - len(changed):
        tell(f"{already} of its nodes were out of service already")
    for line in await _breakers(cluster):
        tell(line)
    return len(changed)


async def release_domain(cluster: ClusterPort, text: str, *, who: str, reason: str, now_s: float, tell: Tell) -> int:
    """Return the nodes of a domain that people took out; those that a policy took out stay. Return their number.

    Raises:
        InvalidConfigError: Without a reason, or if the text is no domain.
        NotFoundError: If there is no such domain.
    """
    one.check_reason(reason, "release")
    domain = await domain_of(cluster, text)
    out = [node for node in domain.nodes if node.tainted]
    changed = [node for node in out if (parse(node.annotation)[0] or Record()).is_persons]
    for at, node in enumerate(changed, 1):
        await one.release(cluster, node.name, who=who, reason=reason, now_s=now_s)
        _progress(tell, at, len(changed), "back in service")
    if kept := len(out) - len(changed):
        tell(f"{kept} of its nodes stay out, since no person took them out; release them by name")
    return len(changed)


def _progress(tell: Tell, at: int, of: int, what: str) -> None:
    if at % SHOWN_EVERY == 0 and at < of:
        tell(f"{at} of {of} nodes are {what}")


async def _breakers(cluster: ClusterPort) -> Sequence[str]:
    """Say which policies take no further node out now, since their breakers count the nodes that people took out."""
    try:
        policies = await list_all(cluster, KIND_FAULT_POLICY)
    except NotAllowedError:
        return ["what this leaves to policies is not shown: you may not list nodefaultpolicies"]
    nodes = await one.read_nodes(cluster)
    lines = []
    for policy in map(parse_fault_policy, policies):
        selected = [node for node in nodes if policy.selects(dict(node.labels))]
        out, limit = sum(node.tainted for node in selected), limit_of(len(selected), policy.nodes_percent)
        if policy.enforce and out >= limit:
            lines.append(
                f"policy {policy.name} takes no further node out: {out} of its nodes are, its breaker allows {limit}"
            )
    return lines
