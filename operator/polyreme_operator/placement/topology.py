"""Arranges nodes by the levels of the ClusterTopology, and reports problems with their labels.

A domain is the path of label values from the top level down to its own. Labels that do not nest (one rack under two
blocks) therefore give two domains, never one in two places: placement continues, and the topology's status reports the
problem.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np

from polyreme_operator.types.inventory import HOST_LEVEL, IntArray, LevelView, RowArray

DISTANCE_STEP = 4
"""Default ratio of a level's distance to that of the level below it."""
NAMED_MAX = 5
"""Nodes or domains named by a problem."""


class ProblemReason(StrEnum):
    """Reasons of a ClusterTopology that is not Ready."""

    LABELS_DO_NOT_NEST = "LabelsDoNotNest"
    NODES_WITHOUT_LABELS = "NodesWithoutLabels"
    NO_NODES = "NoNodes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopologyProblem:
    """A problem with the nodes' labels that an administrator must fix."""

    reason: ProblemReason
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Nodes in the order of their domains."""

    names: tuple[str, ...]
    """In row order: by domain from the top, then by name; nodes without all labels last."""
    levels: tuple[str, ...]
    """Names, top to bottom, the hosts' level included."""
    level_labels: tuple[str, ...]
    domain_LN: RowArray
    domain_names: tuple[tuple[str, ...], ...]
    distance_L: IntArray
    unlabelled: tuple[str, ...] = ()
    """Nodes that lack a label; no gang is placed on them."""
    problems: tuple[TopologyProblem, ...] = ()


def arrange(nodes: Mapping[str, Mapping[str, str]], levels: Sequence[LevelView]) -> Arrangement:
    """Arrange nodes by their labels.

    Args:
        nodes: Labels by node name.
        levels: Top to bottom, without the hosts' level, which is always the last; none: hosts only.
    """
    upper = [level for level in levels if level.node_label != HOST_LEVEL]
    paths = {name: tuple(labels.get(level.node_label, "") for level in upper) for name, labels in nodes.items()}
    labelled = sorted((path, name) for name, path in paths.items() if all(path))
    unlabelled = tuple(sorted(name for name, path in paths.items() if not all(path)))
    names = (*(name for _, name in labelled), *unlabelled)
    domain_LN = np.full((len(upper) + 1, len(names)), -1, dtype=np.int32)
    domain_LN[-1] = np.arange(len(names), dtype=np.int32)
    domain_paths: list[list[tuple[str, ...]]] = []
    for depth in range(len(upper)):
        seen: dict[tuple[str, ...], int] = {}
        numbers = [seen.setdefault(path[: depth + 1], len(seen)) for path, _ in labelled]
        domain_LN[depth, : len(labelled)] = numbers
        domain_paths.append(list(seen))
    domain_names = (*(_names(paths_of_level) for paths_of_level in domain_paths), names)
    host = next((level for level in levels if level.node_label == HOST_LEVEL), None)
    return Arrangement(
        names=names,
        levels=(*(level.name for level in upper), HOST_LEVEL),
        level_labels=(*(level.node_label for level in upper), HOST_LEVEL),
        domain_LN=domain_LN,
        domain_names=domain_names,
        distance_L=distances([*upper, host or LevelView(name="host", node_label=HOST_LEVEL)]),
        unlabelled=unlabelled,
        problems=tuple(_problems(nodes, upper, domain_paths, unlabelled)),
    )


def distances(levels: Sequence[LevelView]) -> IntArray:
    """Return the distance of two nodes that part at each level, hosts' level included and last.

    A level never costs less than the one below it: the way out of a rack leads out of its hosts.
    """
    distance_L = np.ones(len(levels), dtype=np.int64)
    below = 0
    for at in range(len(levels) - 1, -1, -1):
        asked = levels[at].distance
        below = max(1, below * DISTANCE_STEP if asked is None else max(asked, below))
        distance_L[at] = below
    return distance_L


def default_distances(count: int) -> IntArray:
    """Return the distances of ``count`` levels that name none."""
    return distances([LevelView(name="", node_label="")] * count)


def _names(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Name domains by their own label's value, and by the whole path where that is ambiguous."""
    values = Counter(path[-1] for path in paths)
    return tuple(path[-1] if values[path[-1]] == 1 else "/".join(path) for path in paths)


def _problems(
    nodes: Mapping[str, Mapping[str, str]],
    upper: Sequence[LevelView],
    domain_paths: Sequence[Sequence[tuple[str, ...]]],
    unlabelled: tuple[str, ...],
) -> list[TopologyProblem]:
    if not nodes:
        return [TopologyProblem(reason=ProblemReason.NO_NODES, message="the cluster has no nodes")]
    problems = [
        problem
        for depth in range(1, len(upper))
        if (problem := _nesting_problem(upper, depth, domain_paths[depth])) is not None
    ]
    if unlabelled:
        labels = [level.node_label for level in upper]
        lacking = [label for label in labels if not all(nodes[name].get(label) for name in unlabelled)]
        message = (
            f"{len(unlabelled)} of {len(nodes)} nodes lack {_listed(lacking)} and take no gangs: "
            f"{_listed(unlabelled)}; label them"
        )
        problems.append(TopologyProblem(reason=ProblemReason.NODES_WITHOUT_LABELS, message=message))
    return problems


def _nesting_problem(
    upper: Sequence[LevelView], depth: int, paths: Sequence[tuple[str, ...]]
) -> TopologyProblem | None:
    parents: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        parents[path[-1]].add(path[-2])
    torn = sorted(value for value, above in parents.items() if len(above) > 1)
    if not torn:
        return None
    level, above = upper[depth], upper[depth - 1]
    words = "; ".join(
        f"{level.name} {value} lies in {above.name}s {_listed(sorted(parents[value]))}" for value in torn[:NAMED_MAX]
    )
    more = f"; and {len(torn) - NAMED_MAX} more" if len(torn) > NAMED_MAX else ""
    message = (
        f"labels do not nest: {words}{more}; each is taken as several domains until "
        f"{level.node_label} is unique or {above.node_label} is put right"
    )
    return TopologyProblem(reason=ProblemReason.LABELS_DO_NOT_NEST, message=message)


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - NAMED_MAX} more" if len(words) > NAMED_MAX else ""
    return ", ".join(words[:NAMED_MAX]) + more
