"""Nodes that a gang may not use: domains that others have for themselves, and nodes that are held for a preemptor."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import BoolArray, Inventory, RowArray
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

if TYPE_CHECKING:
    from polyreme_operator.scheduler.cycle import SchedulingCycle


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What is held for a job that others make way for."""

    by: JobView
    rows: RowArray
    """Nodes of those who make way."""
    stopping: tuple[str, ...]
    """Those of them that still hold devices."""


def domain_rows(inventory: Inventory, level: str | None, rows_W: RowArray) -> BoolArray | None:
    """Return the nodes of the domains in which these workers sit; None for no level, or nobody there."""
    kept_W = rows_W[rows_W >= 0]
    depth = None if level is None else tree_of(inventory).depth_of(level, inventory.level_labels)
    if depth is None or not len(kept_W):
        return None
    domain_N = inventory.domain_LN[depth]
    return np.isin(domain_N, domain_N[kept_W])


def is_torn(inventory: Inventory, level: str | None, rows_W: RowArray) -> bool:
    """Tell whether workers that should share a domain of a level do not: labels or levels have changed beneath them."""
    kept_W = rows_W[rows_W >= 0]
    if level is None or not len(kept_W):
        return False
    depth = tree_of(inventory).depth_of(level, inventory.level_labels)
    if depth is None:
        return True
    domain_W = inventory.domain_LN[depth][kept_W]
    return bool(domain_W[0] < 0 or (domain_W != domain_W[0]).any())


def exclusive_domains(inventory: Inventory, jobs: Mapping[str, JobView], uids: Collection[str]) -> dict[str, BoolArray]:
    """Return the nodes of the domains that running jobs share with nobody, by job."""
    taken: dict[str, BoolArray] = {}
    for uid in sorted(uids):
        job = jobs[uid]
        if job.spec is None or job.attempt is None:
            continue
        rows_W = rows_of(inventory, job.attempt.placement.node_by_index())
        own_N = domain_rows(inventory, job.spec.topology.exclusive, rows_W)
        if own_N is not None:
            taken[uid] = own_N
    return taken


def rows_of(inventory: Inventory, nodes: Collection[str]) -> RowArray:
    """Return the rows of nodes; -1 for those that are gone."""
    known = inventory.rows
    return np.fromiter((known.get(node, -1) for node in nodes), dtype=np.int32, count=len(nodes))


def blocked_for(work: SchedulingCycle, job: JobView) -> BoolArray:
    """Return the nodes that a job may not use."""
    blocked_N = np.zeros(len(work.inventory.names), dtype=np.bool_)
    for uid, own_N in work.exclusive.items():
        if uid != job.uid:
            blocked_N |= own_N
    for held in work.reservations.values():
        if held.by.uid != job.uid and job.priority <= held.by.priority:
            blocked_N[held.rows] = True
    return blocked_N


def unused(jobs: Mapping[str, JobView], by: JobView, victims: Collection[str]) -> list[str]:
    """Return those of a job's victims that were asked since it last began: what others gave up is held for one start.

    Who lost its place again stands in the order as everybody does. Times are whole seconds; of two in one second the
    start is taken for the earlier, since nobody asks others while it runs.
    """
    began_s = parse_time_or(None if by.attempt is None else by.attempt.started_at, 0.0)
    asked = ((uid, jobs[uid].status.preemption) for uid in sorted(victims))
    return [uid for uid, each in asked if each is not None and parse_time_or(each.requested_at, 0.0) >= began_s]


def reservation_of(work: SchedulingCycle, by: JobView, victims: Collection[str]) -> Reservation:
    """Return what others give up for a job."""
    nodes: list[str] = []
    stopping = []
    for uid in sorted(victims):
        victim = work.cluster.jobs[uid]
        if victim.attempt is None:
            continue
        nodes += victim.attempt.placement.node_by_index()
        if victim.admitted or work.leaving(uid):
            stopping.append(uid)
    rows = rows_of(work.inventory, nodes)
    return Reservation(by=by, rows=np.unique(rows[rows >= 0]), stopping=tuple(stopping))
