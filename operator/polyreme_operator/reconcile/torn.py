"""Gangs that no longer lie in the one domain that their topology requires, since labels or levels have changed."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_operator.types.inventory import HOST_LEVEL, LevelView
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import NodeView


def is_gang_torn(snapshot: JobSnapshot) -> bool:
    """Tell whether the workers of a gang, or of one of its slices, are in more than one domain of the required level.

    Nodes that are gone say nothing: losing them is another failure.
    """
    job, attempt = snapshot.job, snapshot.job.attempt
    if job.spec is None or attempt is None:
        return False
    asked = job.spec.topology
    nodes = [snapshot.nodes.get(name) for name in attempt.placement.node_by_index()]
    if _are_apart(nodes, asked.required, snapshot.levels):
        return True
    size = asked.slice_size
    if size is None:
        return False
    slices = (nodes[at : at + size] for at in range(0, len(nodes), size))
    return any(_are_apart(part, asked.slice_level, snapshot.levels) for part in slices)


def _are_apart(nodes: Sequence[NodeView | None], level: str | None, levels: Sequence[LevelView]) -> bool:
    depth = next((at for at, each in enumerate(levels) if level in {each.name, each.node_label}), None)
    if level is None or (depth is None and level != HOST_LEVEL):
        return False
    above = levels if depth is None else levels[: depth + 1]
    return len({_domain(node, above, host=depth is None) for node in nodes if node is not None and node.labels}) > 1


def _domain(node: NodeView, levels: Sequence[LevelView], *, host: bool) -> tuple[str | None, ...]:
    labels = dict(node.labels)
    return (*(labels.get(level.node_label) for level in levels), *((node.host,) if host else ()))
