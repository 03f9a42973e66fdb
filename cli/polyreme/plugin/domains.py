"""The topology as a tree: how many devices each domain has, how many are free, and who sits there."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from polyreme.plugin.printing import bar
from polyreme.plugin.snapshot import Snapshot
from polyreme.plugin.waiting import holds
from polyreme.views.output import nearest
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_operator.placement.topology import Arrangement, arrange
from polyreme_operator.types.inventory import HOST_LEVEL
from polyreme_operator.types.views import NodeView

HOST = "host"
"""What the lowest level is called."""
NODES_SHOWN_MAX = 32
"""Up to so many nodes each has a line without being asked for."""
LINES_MAX = 2_000
JOBS_SHOWN_MAX = 4
"""Jobs that the line of one domain names."""
BAR_CELLS = 16


@dataclasses.dataclass(slots=True)
class Domain:
    """A domain of some level, or one node."""

    name: str
    level: str
    nodes: int = 0
    unusable: int = 0
    """Nodes that take no new pods."""
    devices: int = 0
    used: int = 0
    lost: int = 0
    """Devices that are free, but on nodes that take no new pods."""
    jobs: Counter[str] = dataclasses.field(default_factory=Counter)
    """Workers by job, as ``namespace/name``."""
    why: str = ""
    """Why a node takes no pods."""
    below: list[Domain] = dataclasses.field(default_factory=list)

    @property
    def free(self) -> int:
        """Devices that a new gang may take."""
        return max(0, self.devices - self.used - self.lost)

    def to_object(self, *, whole: bool) -> dict[str, Any]:
        """Return it as JSON; ``whole``: whether it is known what is free."""
        return {
            "name": self.name,
            "level": self.level,
            "nodes": self.nodes,
            "unusable": self.unusable,
            "devices": self.devices,
            "used": self.used,
            "free": self.free if whole else None,
            "why": self.why or None,
            "jobs": [{"job": name, "workers": count} for name, count in sorted(self.jobs.items())],
            "domains": [domain.to_object(whole=whole) for domain in self.below],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The whole tree."""

    root: Domain
    levels: tuple[str, ...]
    resource: str
    problems: tuple[str, ...] = ()
    whole: bool = True
    """Whether the use by all namespaces is known; if not, it is not known what is free."""


def picture(seen: Snapshot, *, level: str | None = None, domain: str | None = None, whole: bool = True) -> Picture:
    """Work out the tree.

    Args:
        seen: Nodes, pods, jobs and the ClusterTopology.
        level: Lowest level that is shown; None: hosts if there are few, else the level above them.
        domain: Only this domain, down to its hosts if no level is named.
        whole: Whether jobs and pods are those of all namespaces.

    Raises:
        InvalidConfigError: If there is no such level.
        NotFoundError: If there is no such domain.
    """
    levels = () if seen.topology is None else seen.topology.levels
    plan = arrange({node.name: {**dict(node.labels), HOST_LEVEL: node.host} for node in seen.nodes}, levels)
    names = (*plan.levels[:-1], HOST)
    if level is not None and level not in names:
        raise InvalidConfigError(f"no level {level!r}, expected one of {', '.join(names)}", field="--level")
    resource = device_resource(seen)
    tree = _tree(plan, names, _leaves(seen, resource))
    root = tree if domain is None else _find(tree, domain)
    few = domain is not None or len(seen.nodes) <= NODES_SHOWN_MAX
    _cut(root, names, level or (HOST if few else names[max(0, len(names) - 2)]))
    problems = tuple(f"{problem.reason}: {problem.message}" for problem in plan.problems)
    return Picture(root=root, levels=names, resource=resource, problems=problems, whole=whole)


def device_resource(seen: Snapshot) -> str:
    """Return the resource that most nodes count devices in: of those that jobs ask for, if they ask."""
    asked = {job.spec.workers.device_resource for job in seen.jobs if job.spec is not None}
    offered = Counter(name for node in seen.nodes for name, amount in node.allocatable if "/" in name and amount)
    ranked = sorted(offered, key=lambda name: (name not in asked, -offered[name], name))
    return ranked[0] if ranked else min(asked, default="")


def render(drawn: Picture) -> RenderableType:
    """Draw the tree."""
    lines = [LINES_MAX]
    tree = Tree(_line(drawn, drawn.root), guide_style="dim")
    _grow(drawn, tree, drawn.root, lines)
    parts: list[RenderableType] = [tree]
    if lines[0] < 0:
        parts.append(Text(f"and {-lines[0]} more lines; show one domain with --domain, or fewer levels with --level"))
    parts += [Text(problem, style="yellow") for problem in drawn.problems]
    return Group(*parts)


def _grow(drawn: Picture, tree: Tree, domain: Domain, lines: list[int]) -> None:
    for child in domain.below:
        lines[0] -= 1
        if lines[0] >= 0:
            _grow(drawn, tree.add(_line(drawn, child)), child, lines)


def _line(drawn: Picture, domain: Domain) -> Text:
    line = Text(f"{domain.level} {domain.name}  " if domain.level else f"{domain.name}  ", style="bold")
    if domain.devices:
        line.append(bar(domain.used, domain.devices, width=BAR_CELLS))
        free = f", {domain.free} free" if drawn.whole else ""
        line.append(f" {domain.used}/{domain.devices} used{free}", style="not bold")
    else:
        line.append(f"no {drawn.resource or 'devices'}", style="not bold")
    if domain.level != HOST:
        unusable = f", {domain.unusable} unusable" if domain.unusable else ""
        nodes = "1 node" if domain.nodes == 1 else f"{domain.nodes} nodes"
        line.append(f"; {nodes}{unusable}", style="not bold")
    elif domain.why:
        line.append(f"; {domain.why}", style="red not bold")
    named = sorted(domain.jobs.items(), key=lambda entry: (-entry[1], entry[0]))
    words = [f"{name} x{count}" for name, count in named[:JOBS_SHOWN_MAX]]
    if len(named) > JOBS_SHOWN_MAX:
        words.append(f"{len(named) - JOBS_SHOWN_MAX} more jobs")
    if words:
        line.append(f"; {', '.join(words)}", style="cyan not bold")
    return line


def _leaves(seen: Snapshot, resource: str) -> Mapping[str, Domain]:
    """Return what is known of each node by itself."""
    used: Counter[str] = Counter()
    jobs: dict[str, Counter[str]] = defaultdict(Counter)
    for (name, _, where), taken in _places(seen, resource).items():
        used[where] += taken
        jobs[where][name] += 1
    for pod in seen.foreign:
        used[pod.node] += dict(pod.requests).get(resource, 0)
    leaves = {}
    for node in seen.nodes:
        devices, usable = node.capacity(resource), node.usable and not node.is_faulty
        leaves[node.name] = Domain(
            name=node.name,
            level=HOST,
            nodes=1,
            unusable=0 if usable else 1,
            devices=devices,
            used=used[node.name],
            lost=0 if usable else max(0, devices - used[node.name]),
            jobs=jobs[node.name],
            why=_why(node),
        )
    return leaves


def _places(seen: Snapshot, resource: str) -> dict[tuple[str, int, str], int]:
    """Return the devices of each worker's place: of admitted jobs, and of pods that have not ended."""
    places: dict[tuple[str, int, str], int] = {}
    for job in seen.jobs:
        if holds(job) and job.attempt is not None and job.spec is not None:
            devices = job.attempt.devices if job.spec.workers.device_resource == resource else 0
            for index, node in enumerate(job.attempt.placement.node_by_index()):
                places[f"{job.namespace}/{job.name}", index, node] = devices
    for pod in seen.pods:
        if pod.place and not pod.ended:
            key = (f"{pod.namespace}/{pod.job_name}", pod.index, pod.place)
            places.setdefault(key, dict(pod.requests).get(resource, 0))
    return places


def _why(node: NodeView) -> str:
    if node.out_of_service or node.is_faulty:
        return "out of service"
    if not node.ready:
        return "not ready"
    return "cordoned" if node.unschedulable else ""


def _tree(plan: Arrangement, names: tuple[str, ...], leaves: Mapping[str, Domain]) -> Domain:
    """Hang the nodes below their domains; those that lack a label lie right below the root."""
    root = Domain(name="cluster", level="")
    made: dict[tuple[int, int], Domain] = {}
    for row, name in enumerate(plan.names):
        above = root
        for depth in range(len(names) - 1):
            number = int(plan.domain_LN[depth, row])
            if number < 0:
                break
            if (depth, number) not in made:
                made[depth, number] = Domain(name=plan.domain_names[depth][number], level=names[depth])
                above.below.append(made[depth, number])
            above = made[depth, number]
        leaf = leaves[name]
        if name in plan.unlabelled:
            leaf.why = leaf.why or "lacks a label of the topology"
            leaf.unusable, leaf.lost = 1, max(0, leaf.devices - leaf.used)
        above.below.append(leaf)
    _sum(root)
    return root


def _sum(domain: Domain) -> None:
    if domain.level == HOST:
        return
    for child in domain.below:
        _sum(child)
        domain.nodes += child.nodes
        domain.unusable += child.unusable
        domain.devices += child.devices
        domain.used += child.used
        domain.lost += child.lost
        domain.jobs += child.jobs


def _find(root: Domain, name: str) -> Domain:
    known: dict[str, Domain] = {}
    line = [root]
    while line:
        domain = line.pop()
        known.setdefault(domain.name, domain)
        line += domain.below
    if name not in known:
        raise NotFoundError(f"no domain {name!r}: {nearest(name, sorted(known))}", field="--domain")
    return known[name]


def _cut(domain: Domain, names: tuple[str, ...], lowest: str) -> None:
    """Drop what lies below a level."""
    if domain.level and names.index(domain.level) >= names.index(lowest):
        domain.below = []
    for child in domain.below:
        _cut(child, names, lowest)
    if not domain.level and lowest != HOST:
        # Nodes without labels lie at the root: they are counted there.
        domain.below = [child for child in domain.below if child.level != HOST]
