"""All nodes as arrays, updated node by node; a scheduling cycle takes a snapshot.

Shape suffixes: S slots, N nodes in row order, R resources. A node has a *slot* while it exists or usage is
charged to it; then another node may get the slot. Rows are rearranged when nodes, labels or levels change, slots never
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.spares import spares_N
from polyreme_operator.placement.topology import Arrangement, arrange
from polyreme_operator.types.inventory import HOST_LEVEL, Inventory, LevelView, NodeClass, Requests, SparesView
from polyreme_operator.types.views import NodeView

_SLOTS_AT_FIRST = 64
_COLUMNS_AT_FIRST = 8


class NodeTable:
    """Capacity and usage of every node."""

    def __init__(self) -> None:
        self.views: dict[str, NodeView] = {}
        self.booked = False
        """Whether usage was added; the reader resets it."""
        self._levels: tuple[LevelView, ...] = ()
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._columns: dict[str, int] = {}
        self._free: list[int] = []
        """Columns of resources that no node states and nothing uses any more."""
        self._used_SR = np.zeros((_SLOTS_AT_FIRST, _COLUMNS_AT_FIRST), dtype=np.int64)
        self._busy_S = np.zeros(_SLOTS_AT_FIRST, dtype=np.int32)
        self._arrangement: Arrangement | None = None
        self._fixed: Inventory | None = None
        self._row_slots_N: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self._shown_columns: list[int] = []
        self._stated: frozenset[str] = frozenset()
        """Resources of the visible columns."""
        self._stale: set[str] = set()

    @property
    def offered(self) -> frozenset[str]:
        """Resources of any node, as of the last snapshot."""
        return self._stated

    @property
    def slots(self) -> int:
        """Largest number of slots ever used at a time."""
        return len(self._slots) + len(self._free_slots)

    @property
    def columns(self) -> int:
        """Largest number of resources ever charged at a time."""
        return len(self._columns) + len(self._free)

    def put(self, view: NodeView) -> NodeView | None:
        """Add or replace a node; return its previous state."""
        before = self.views.get(view.name)
        self.views[view.name] = view
        if before is None or (before.labels, before.host) != (view.labels, view.host):
            self._fixed = self._arrangement = None
        elif before != view:
            self._stale.add(view.name)
        return before

    def remove(self, name: str) -> NodeView | None:
        """Remove a node; usage of its pods stays charged in case it returns."""
        before = self.views.pop(name, None)
        if before is not None:
            self._fixed = self._arrangement = None
            self._stale.discard(name)
            self._free_slot(name)
        return before

    def set_levels(self, levels: Sequence[LevelView]) -> None:
        """Set the levels of the topology."""
        if tuple(levels) != self._levels:
            self._levels = tuple(levels)
            self._fixed = self._arrangement = None

    def add(self, node: str, requests: Requests, sign: int, *, busy: bool) -> None:
        """Charge or release the usage of one pod."""
        self.booked |= sign > 0
        slot = self._slot(node)
        for resource, amount in requests:
            # Look the column up first: the first charge of a resource may reallocate the array.
            column = self._column(resource)
            self._used_SR[slot, column] += sign * amount
        if busy:
            self._busy_S[slot] += sign
        if sign < 0:
            self._free_columns(requests)
            if node not in self.views:
                self._free_slot(node)

    def free(self, node: str) -> dict[str, int]:
        """Return what is left of each resource that a node has."""
        view = self.views.get(node)
        used_R = self._used_SR[self._slot(node)] if view is not None else ()
        return {
            resource: amount - int(used_R[self._column(resource)])
            for resource, amount in (() if view is None else view.allocatable)
        }

    def arrangement(self) -> Arrangement:
        """Return the nodes in the order of their domains."""
        if self._arrangement is None:
            labels = {name: {**dict(view.labels), HOST_LEVEL: view.host} for name, view in self.views.items()}
            self._arrangement = arrange(labels, self._levels)
        return self._arrangement

    def snapshot(self) -> Inventory:
        """Return a snapshot of all nodes; its usage arrays belong to the caller."""
        if self._fixed is None:
            self._fixed = self._build()
        elif self._stale:
            self._fixed = self._renew(self._fixed)
        self._stale.clear()
        fixed = self._fixed
        used_NR = self._used_SR[self._row_slots_N][:, self._shown_columns]
        return _copy(fixed, used_NR=used_NR, busy_N=self._busy_S[self._row_slots_N])

    def spares(self, spares: SparesView | None) -> list[str]:
        """Return the names of the nodes that are kept as spares."""
        if spares is None:
            return []
        inventory = self.snapshot()
        return [inventory.names[row] for row in np.flatnonzero(spares_N(inventory, spares)).tolist()]

    def _build(self) -> Inventory:
        arrangement = self.arrangement()
        names = arrangement.names
        stated = sorted({resource for view in self.views.values() for resource, _ in view.allocatable})
        columns = {resource: at for at, resource in enumerate(stated)}
        self._shown_columns = [self._column(resource) for resource in stated]
        self._stated = frozenset(stated)
        self._row_slots_N = np.fromiter((self._slot(name) for name in names), dtype=np.intp, count=len(names))
        classes: dict[tuple[Any, Any], int] = {}
        inventory = Inventory(
            names=names,
            rows={name: row for row, name in enumerate(names)},
            resources=tuple(stated),
            capacity_NR=np.zeros((len(names), len(stated)), dtype=np.int64),
            used_NR=np.zeros((0, 0), dtype=np.int64),
            usable_N=np.zeros(len(names), dtype=np.bool_),
            risk_N=np.zeros(len(names), dtype=np.float32),
            busy_N=np.zeros(0, dtype=np.int32),
            owned_N=np.zeros(len(names), dtype=np.bool_),
            class_N=np.zeros(len(names), dtype=np.int32),
            classes=(),
            levels=arrangement.levels,
            level_labels=arrangement.level_labels,
            distance_L=arrangement.distance_L,
            domain_LN=arrangement.domain_LN,
            domain_names=arrangement.domain_names,
        )
        for row, name in enumerate(names):
            self._fill(inventory, row, self.views[name], columns, classes)
        inventory.classes = _classes(classes)
        return inventory

    def _renew(self, known: Inventory) -> Inventory:
        """Update the rows of changed nodes in new arrays, since older snapshots keep theirs."""
        resources = set(known.resources)
        if any(resource not in resources for name in self._stale for resource, _ in self.views[name].allocatable):
            return self._build()
        classes = {(tuple(sorted(each.labels.items())), each.taints): at for at, each in enumerate(known.classes)}
        inventory = _copy(
            known,
            capacity_NR=known.capacity_NR.copy(),
            usable_N=known.usable_N.copy(),
            risk_N=known.risk_N.copy(),
            owned_N=known.owned_N.copy(),
            class_N=known.class_N.copy(),
            memo={},
        )
        columns = {resource: at for at, resource in enumerate(known.resources)}
        for name in self._stale:
            self._fill(inventory, known.rows[name], self.views[name], columns, classes)
        inventory.classes = _classes(classes)
        return inventory

    def _fill(
        self,
        inventory: Inventory,
        row: int,
        view: NodeView,
        columns: dict[str, int],
        classes: dict[tuple[Any, Any], int],
    ) -> None:
        inventory.capacity_NR[row] = 0
        for resource, amount in view.allocatable:
            inventory.capacity_NR[row, columns[resource]] = amount
        inventory.usable_N[row] = view.usable and bool((inventory.domain_LN[:, row] >= 0).all())
        inventory.risk_N[row] = view.risk
        inventory.owned_N[row] = view.owned
        inventory.class_N[row] = classes.setdefault((view.labels, view.taints), len(classes))

    def _slot(self, node: str) -> int:
        slot = self._slots.get(node)
        if slot is None:
            slot = self._slots[node] = self._free_slots.pop() if self._free_slots else len(self._slots)
            if slot >= len(self._busy_S):
                self._used_SR = np.concatenate([self._used_SR, np.zeros_like(self._used_SR)])
                self._busy_S = np.concatenate([self._busy_S, np.zeros_like(self._busy_S)])
        return slot

    def _free_slot(self, node: str) -> None:
        """Free the slot of a removed node once nothing is charged to it."""
        slot = self._slots.get(node)
        if slot is not None and not self._busy_S[slot] and not self._used_SR[slot].any():
            self._free_slots.append(self._slots.pop(node))

    def _free_columns(self, requests: Requests) -> None:
        """Free the columns of resources that no node states once nothing uses them."""
        for resource, _ in requests:
            if resource not in self._stated and not self._used_SR[:, self._columns[resource]].any():
                self._free.append(self._columns.pop(resource))

    def _column(self, resource: str) -> int:
        column = self._columns.get(resource)
        if column is None:
            column = self._free.pop() if self._free else len(self._columns)
            self._columns[resource] = column
            if column >= self._used_SR.shape[1]:
                self._used_SR = np.concatenate([self._used_SR, np.zeros_like(self._used_SR)], axis=1)
        return column


def _classes(numbers: dict[tuple[Any, Any], int]) -> tuple[NodeClass, ...]:
    return tuple(NodeClass(labels=dict(labels), taints=taints) for labels, taints in numbers)


def _copy(inventory: Inventory, **changes: Any) -> Inventory:
    fields = {name: getattr(inventory, name) for name in Inventory.__slots__}
    return Inventory(**{**fields, **changes})
