"""The tree of domains as ranges of rows: sums, depths and neighbours without walking nodes.

Shape suffixes: N nodes, L levels, D domains of one level, P domains of the level above. Rows are in the order of their
domains (``types/inventory.py``), so a domain is a range of rows, and a domain's children a range of domains.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polyreme_operator.placement.topology import default_distances
from polyreme_operator.types.inventory import BoolArray, IntArray, Inventory, RowArray


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """The domains of one level."""

    name: str
    start_D: IntArray
    """First row."""
    end_D: IntArray
    """Row after the last."""
    parent_D: IntArray
    """Domain of the level above; 0 at the top, for the whole cluster."""
    names: tuple[str, ...]

    def sums(self, value_N: Any) -> IntArray:
        """Sum over each domain's rows."""
        total = np.zeros(len(value_N) + 1, dtype=np.int64)
        np.cumsum(value_N, out=total[1:])
        sum_D: IntArray = total[self.end_D] - total[self.start_D]
        return sum_D

    def rows_in(self, chosen_D: BoolArray, rows: int) -> BoolArray:
        """Return which of all rows lie in these domains; rows without labels come last and lie in none."""
        inside_N = np.zeros(rows, dtype=np.bool_)
        labelled_N = np.repeat(chosen_D, self.end_D - self.start_D)
        inside_N[: len(labelled_N)] = labelled_N
        return inside_N


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """All levels, top to bottom, the hosts last."""

    levels: tuple[Level, ...]
    rise_L: IntArray
    """What parting at a level adds to the distance: two nodes that part at a level part at all below it too."""
    domain_LN: RowArray

    def depth_of(self, level: str, labels: tuple[str, ...]) -> int | None:
        """Return the index of a level, by name or by node label; None if there is none."""
        names = [known.name for known in self.levels]
        if level in names:
            return names.index(level)
        if level in labels:
            return labels.index(level)
        return len(names) - 1 if level == "host" else None


def tree_of(inventory: Inventory) -> Tree:
    """Return the tree of this version of the nodes."""
    found = inventory.memo.get("tree")
    if found is None:
        found = inventory.memo["tree"] = _tree(inventory)
    tree: Tree = found
    return tree


def _tree(inventory: Inventory) -> Tree:
    domain_LN = inventory.domain_LN
    labelled = len(inventory.names)
    if len(inventory.levels) > 1:
        labelled = int(np.count_nonzero(domain_LN[0] >= 0))
    levels: list[Level] = []
    for depth, name in enumerate(inventory.levels):
        own = domain_LN[depth, :labelled]
        assert labelled == 0 or (np.diff(own) >= 0).all(), f"rows are not in the order of their domains at {name}"
        start_D = np.flatnonzero(np.diff(own, prepend=-1)).astype(np.int64)
        end_D = np.append(start_D[1:], labelled) if len(start_D) else start_D
        parent_D = domain_LN[depth - 1, start_D].astype(np.int64) if depth else np.zeros(len(start_D), dtype=np.int64)
        levels.append(
            Level(
                name=name,
                start_D=start_D,
                end_D=end_D,
                parent_D=parent_D,
                names=inventory.domain_names[depth],
            )
        )
    distance_L = inventory.distance_L
    if distance_L is None:
        distance_L = default_distances(len(levels))
    return Tree(levels=tuple(levels), rise_L=distance_L - np.append(distance_L[1:], 0), domain_LN=domain_LN)
