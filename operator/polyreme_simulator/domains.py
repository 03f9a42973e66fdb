"""Topology domains, computed from node labels: the oracle for the topology that a placement must keep."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_cluster.port import Manifest

HOST = "host"
TOPOLOGY = "default"


@dataclasses.dataclass(frozen=True)
class Domains:
    """Labels of the nodes, and the levels that a ClusterTopology names."""

    tags: Mapping[str, Mapping[str, str]]
    levels: Sequence[tuple[str, str]]
    """Pairs of name and node label, top to bottom; the host is below the last."""

    def after(self, kind: str, manifest: Manifest, *, deleted: bool) -> Domains:
        """Return what is true after a change of a node or a topology."""
        name = manifest["metadata"]["name"]
        if kind == "Node":
            tags = {node: tags for node, tags in self.tags.items() if node != name}
            if not deleted:
                tags[name] = manifest["metadata"].get("labels") or {}
            return Domains(tags, self.levels)
        if name != TOPOLOGY:
            return self
        levels = [] if deleted else [(entry["name"], entry["nodeLabel"]) for entry in manifest["spec"]["levels"]]
        return Domains(self.tags, levels)

    def domain(self, level: str, node: str) -> str | None:
        """Return the domain of a node at a level; None if it has none, or the level is unknown.

        A domain is its whole path: racks of one name in two blocks are two racks.
        """
        if level == HOST:
            return node
        names = [name for name, _ in self.levels]
        if level not in names or node not in self.tags:
            return None
        path = [self.tags[node].get(label) for _, label in self.levels[: names.index(level) + 1]]
        return None if None in path else "/".join(path)  # type: ignore[arg-type]

    def labelled(self, node: str) -> bool:
        """Tell whether a node has every label of the topology: otherwise its place is unknown."""
        tags = self.tags.get(node) or {}
        return all(tags.get(label) for _, label in self.levels)

    def keeps(self, topology: Mapping[str, Any], nodes: Sequence[str]) -> bool:
        """Tell whether a gang lies as near as it requires."""
        required = topology.get("required")
        if required is None:
            return True
        found = {self.domain(required, node) for node in nodes}
        return len(found) == 1 and None not in found

    def apart(
        self, topology: Mapping[str, Any], nodes: Sequence[str], other: Mapping[str, Any], theirs: Sequence[str]
    ) -> bool:
        """Tell whether neither of two gangs lies in a domain that the other wants for itself."""
        for level in {topology.get("exclusive"), other.get("exclusive")} - {None}:
            mine = {self.domain(str(level), node) for node in nodes} - {None}
            if mine & {self.domain(str(level), node) for node in theirs}:
                return False
        return True

    def holds(self, topology: Mapping[str, Any], slots: Mapping[str, int], wanted: int) -> bool:
        """Tell whether nodes with this room can hold a gang as near as it requires."""
        required = topology.get("required")
        in_domain: Counter[str] = Counter()
        for node, room in slots.items():
            domain = "" if required is None else self.domain(required, node)
            if domain is not None and room > 0:
                in_domain[domain] += room
        return max(in_domain.values(), default=0) >= wanted
