"""Capacity freed in a range of nodes when some jobs are preempted, computed with arrays.

Shape suffixes: N nodes, K nodes of one range, R resources, V candidates, D domains of one level, P pairs of a candidate
and a node that it holds, A pairs of a domain and a candidate in it. Rows are in the order of their domains, so a domain
is a range of rows, and pairs are sorted by row, so those of a domain are a range of pairs.

A domain's *bound* is a lower bound of the cost of freeing it. It relaxes the choice to a fractional knapsack over one
resource, the one that is scarcest for this gang: candidates free their share cheapest first, and the last one may free
a fraction. No real choice is cheaper, because whole workers need at least that much of each resource.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.domains import CLUSTER, Domain, rooms_of
from polyreme_operator.placement.eligible import accepted_N, room_N
from polyreme_operator.placement.topology_request import TopologyRequest
from polyreme_operator.placement.tree import Tree
from polyreme_operator.scheduler.preemption.cost import Float64Array
from polyreme_operator.types.inventory import BoolArray, GangRequest, IntArray, Inventory
from polyreme_operator.types.queues import Running


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VictimSpace:
    """The nodes after all jobs that already stop are gone, and what each candidate holds of them."""

    inventory: Inventory
    """``used_NR`` and ``busy_N`` exclude the jobs that already stop."""
    tree: Tree
    requested: TopologyRequest
    request: GangRequest
    open_N: BoolArray
    """Nodes that the gang may use."""
    cost_V: Float64Array
    """Cost of preempting each candidate."""
    victim_P: IntArray
    row_P: IntArray
    workers_P: IntArray
    held_PR: IntArray

    def range_of(self, domain: Domain) -> tuple[int, int]:
        """Return the first row of a domain and the row after its last; nodes without labels lie in none."""
        if domain.depth == CLUSTER:
            top = self.tree.levels[0]
            return 0, int(top.end_D[-1]) if len(top.end_D) else 0
        level = self.tree.levels[domain.depth]
        return int(level.start_D[domain.number]), int(level.end_D[domain.number])

    def widened(self, domain: Domain) -> tuple[int, int]:
        """Return the rows to look at: an exclusive gang may have to free a domain larger than its own."""
        depth = self.requested.exclusive
        start, end = self.range_of(domain)
        if depth is None or depth >= domain.depth:
            return start, end
        return self.range_of(Domain(depth, int(self.tree.domain_LN[depth, start])))


def victim_space(
    inventory: Inventory,
    tree: Tree,
    requested: TopologyRequest,
    request: GangRequest,
    *,
    blocked_N: BoolArray | None,
    leaving: Sequence[Running],
    candidates: Sequence[Running],
    cost_V: Float64Array,
) -> VictimSpace:
    """Return the arrays of what each candidate holds.

    Args:
        inventory: The nodes, and what is taken of them; left as it is.
        tree: Their domains.
        requested: What the gang asks of the topology.
        request: What it asks of the nodes.
        blocked_N: Nodes that it may not use.
        leaving: Jobs that already stop.
        candidates: Jobs that may be preempted.
        cost_V: Cost of preempting each of them.
    """
    used_NR, busy_N = inventory.used_NR.copy(), inventory.busy_N.copy()
    _, row_P, workers_P, held_PR = _pairs(inventory, leaving)
    np.subtract.at(used_NR, row_P, held_PR)
    np.subtract.at(busy_N, row_P, workers_P.astype(busy_N.dtype))
    open_N = inventory.usable_N & accepted_N(inventory, request.constraints)
    if blocked_N is not None:
        open_N &= ~blocked_N
    victim_P, row_P, workers_P, held_PR = _pairs(inventory, candidates)
    return VictimSpace(
        inventory=dataclasses.replace(inventory, used_NR=used_NR, busy_N=busy_N),
        tree=tree,
        requested=requested,
        request=request,
        open_N=open_N,
        cost_V=cost_V,
        victim_P=victim_P,
        row_P=row_P,
        workers_P=workers_P,
        held_PR=held_PR,
    )


def _pairs(inventory: Inventory, jobs: Sequence[Running]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return job, row, workers and holdings of every pair of a job and a node that it holds, sorted by row."""
    count = max(1, len(jobs))
    lengths = [len(job.rows_W) for job in jobs]
    row_W = np.concatenate([job.rows_W for job in jobs]).astype(np.int64) if jobs else np.zeros(0, dtype=np.int64)
    job_W = np.repeat(np.arange(len(jobs), dtype=np.int64), lengths)
    there = row_W >= 0
    key_P, workers_P = np.unique(row_W[there] * count + job_W[there], return_counts=True)
    row_P, job_P = key_P // count, key_P % count
    each_VR = np.zeros((len(jobs), len(inventory.resources)), dtype=np.int64)
    columns = {resource: column for column, resource in enumerate(inventory.resources)}
    for at, job in enumerate(jobs):
        for resource, amount in job.requests:
            if resource in columns:
                each_VR[at, columns[resource]] = amount
    return job_P, row_P, workers_P.astype(np.int64), each_VR[job_P] * workers_P[:, None]


def reachable(space: VictimSpace, depth: int) -> list[tuple[float, Domain]]:
    """Return the domains of a level that could hold the gang without any candidate, cheapest bound first."""
    inventory, tree = space.inventory, space.tree
    used_NR, busy_N = inventory.used_NR.copy(), inventory.busy_N.copy()
    np.subtract.at(used_NR, space.row_P, space.held_PR)
    np.subtract.at(busy_N, space.row_P, space.workers_P.astype(busy_N.dtype))
    slots_N = np.where(space.open_N, _room(inventory, slice(None), used_NR, space.request), 0).astype(np.int32)
    slots_N[_shared_N(space, busy_N)] = 0
    rooms = rooms_of(tree, space.requested, slots_N)
    if depth == CLUSTER:
        domains = [Domain(CLUSTER, 0)] if rooms.cluster >= space.request.workers else []
    else:
        domains = [Domain(depth, int(at)) for at in np.flatnonzero(rooms.by_depth[depth] >= space.request.workers)]
    bound_D = _bounds(space, depth)
    return sorted(((float(bound_D[domain.number]), domain) for domain in domains), key=lambda pair: pair[0])


def _shared_N(space: VictimSpace, busy_N: NDArray[np.int32]) -> BoolArray:
    """Return the nodes of domains that other jobs still use although the gang needs exclusive ones."""
    if space.requested.exclusive is None:
        return np.zeros(len(busy_N), dtype=np.bool_)
    level = space.tree.levels[space.requested.exclusive]
    return level.rows_in(level.sums(busy_N > 0) > 0, len(busy_N))


def _bounds(space: VictimSpace, depth: int) -> Float64Array:
    """Return the bound of each domain of a level."""
    inventory, request = space.inventory, space.request
    domain_N = np.zeros(len(inventory.names), dtype=np.int64)
    if depth != CLUSTER:
        domain_N = space.tree.domain_LN[depth].astype(np.int64)
    count = int(domain_N.max(initial=-1)) + 1
    asked = [(inventory.resources.index(name), amount) for name, amount in request.requests if amount > 0]
    if not asked or not count:
        return np.zeros(max(1, count))
    inside_N = space.open_N & (domain_N >= 0)
    free_NR = np.maximum(0, inventory.capacity_NR - inventory.used_NR)[inside_N]
    column, amount = min(asked, key=lambda pair: float(free_NR[:, pair[0]].sum()) / pair[1])
    base_D = np.bincount(domain_N[inside_N], weights=free_NR[:, column] / amount, minlength=count)
    counts_P = inside_N[space.row_P] & (space.held_PR[:, column] > 0)
    candidates = max(1, len(space.cost_V))
    key_P = domain_N[space.row_P[counts_P]] * candidates + space.victim_P[counts_P]
    key_A, at_P = np.unique(key_P, return_inverse=True)
    gain_A = np.bincount(at_P, weights=space.held_PR[counts_P, column] / amount, minlength=len(key_A))
    domain_A, cost_A = key_A // candidates, space.cost_V[key_A % candidates]
    order_A = np.lexsort((cost_A / gain_A, domain_A))
    domain_A, cost_A, gain_A = domain_A[order_A], cost_A[order_A], gain_A[order_A]
    total_A = np.cumsum(gain_A) - gain_A
    first_A = np.searchsorted(domain_A, domain_A, side="left")
    before_A = total_A - total_A[first_A] if len(total_A) else total_A
    part_A = np.clip((request.workers - base_D[domain_A] - before_A) / gain_A, 0.0, 1.0)
    bound_D: Float64Array = np.bincount(domain_A, weights=part_A * cost_A, minlength=count).astype(np.float64)
    return bound_D


def _room(inventory: Inventory, rows: slice | IntArray, used_KR: IntArray, request: GangRequest) -> IntArray:
    """Return how many workers fit on some nodes if this much of them is used."""
    part = dataclasses.replace(
        inventory, names=("",) * len(used_KR), capacity_NR=inventory.capacity_NR[rows], used_NR=used_KR
    )
    return room_N(part, request.requests).astype(np.int64)


class Region:
    """One domain, and the range of rows in which victims matter to it."""

    def __init__(self, space: VictimSpace, domain: Domain) -> None:
        self._space = space
        start, end = space.widened(domain)
        inner_start, inner_end = space.range_of(domain)
        low, high = np.searchsorted(space.row_P, (start, end))
        self._rows = slice(start, end)
        self._inside = slice(inner_start - start, inner_end - start)
        self._used_KR = space.inventory.used_NR[start:end]
        self._busy_K = space.inventory.busy_N[start:end].astype(np.int64)
        self._at_P = space.row_P[low:high] - start
        self._victim_P = space.victim_P[low:high]
        self._workers_P = space.workers_P[low:high]
        self._held_PR = space.held_PR[low:high]
        self.work_units = (end - start) + int(high - low)
        """Work units of computing the region's room once."""
        self.candidates: IntArray = np.unique(self._victim_P)
        self.plain = space.requested.exclusive is None and space.requested.slice_workers == 1
        """Whether room is a sum over nodes, so that each victim's share can be computed separately."""

    def gains(self) -> Float64Array:
        """Return about how many workers, in fractions, each candidate makes room for."""
        gain_V: Float64Array = np.bincount(
            self._victim_P, weights=self._gain_P(), minlength=len(self._space.cost_V)
        ).astype(np.float64)
        if self._space.requested.exclusive is not None:
            return self._gains_of_whole_domains(gain_V)
        return gain_V

    def _gain_P(self) -> Float64Array:
        """Return about how many workers, in fractions, each pair makes room for."""
        space = self._space
        request, inventory = space.request, space.inventory
        columns = [inventory.resources.index(name) for name, amount in request.requests if amount > 0]
        amount_R = np.array([amount for _, amount in request.requests if amount > 0], dtype=np.float64)
        # Per node only its scarcest resource counts, by an empty node: pods and cpu are rarely the limit.
        share_KR = inventory.capacity_NR[self._rows][:, columns] / amount_R
        scarcest_P = share_KR.argmin(axis=1)[self._at_P]
        gain_P = (self._held_PR[:, columns] / amount_R)[np.arange(len(self._at_P)), scarcest_P]
        gain_P[~space.open_N[self._rows][self._at_P]] = 0.0
        found_P: Float64Array = gain_P.astype(np.float64)
        return found_P

    def _gains_of_whole_domains(self, gain_V: Float64Array) -> Float64Array:
        """Rank the victims of an exclusive gang by the domain that they free together, not one by one."""
        space = self._space
        assert space.requested.exclusive is not None
        domain_K = space.tree.domain_LN[space.requested.exclusive, self._rows].astype(np.int64)
        domain_P = domain_K[self._at_P]
        width = int(domain_K.max(initial=0)) + 1
        room_K = np.where(
            space.open_N[self._rows],
            room_N(space.inventory, space.request.requests, empty=True)[self._rows],
            0,
        )
        room_D = np.bincount(domain_K[domain_K >= 0], weights=room_K[domain_K >= 0], minlength=width)
        pairs = np.unique(domain_P * len(gain_V) + self._victim_P)
        domain_A, victim_A = pairs // len(gain_V), pairs % len(gain_V)
        cost_D = np.bincount(domain_A, weights=space.cost_V[victim_A], minlength=width)
        staying_K = self._busy_K.copy()
        np.subtract.at(staying_K, self._at_P, self._workers_P)
        staying_D = np.bincount(domain_K[domain_K >= 0], weights=staying_K[domain_K >= 0], minlength=width)
        value_D = np.where(staying_D > 0, 0.0, room_D / np.maximum(cost_D, 1e-9))
        best_V = np.zeros(len(gain_V))
        np.maximum.at(best_V, victim_A, value_D[domain_A])
        return best_V * space.cost_V

    def room(self, gone_V: BoolArray) -> int:
        """Return how many workers fit into the domain without these victims."""
        slots_K = self._slots_K(gone_V)[self._inside]
        size = self._space.requested.slice_workers
        if size == 1:
            return int(slots_K.sum())
        rows = slice(self._rows.start + self._inside.start, self._rows.start + self._inside.stop)
        slice_K = self._space.tree.domain_LN[self._space.requested.slice_depth, rows].astype(np.int64)
        slots_S = np.bincount(slice_K - slice_K.min(initial=0), weights=slots_K).astype(np.int64)
        return int((slots_S // size * size).sum())

    def open_pairs(self) -> tuple[IntArray, IntArray, Float64Array]:
        """Return of every pair on a node that the gang may use, by row: row, candidate, and about the room it takes."""
        open_P = self._space.open_N[self._rows.start + self._at_P]
        return self._at_P[open_P], self._victim_P[open_P], self._gain_P()[open_P]

    def clearable_K(self) -> IntArray:
        """Return how much room each node gains if all candidates on it are gone; for plain gangs only."""
        everybody_V = np.ones(len(self._space.cost_V), dtype=np.bool_)
        return self._slots_K(everybody_V) - self._slots_K(~everybody_V)

    def freed_alone(self) -> IntArray:
        """Return how much room each candidate frees by itself; for plain gangs only."""
        none_V = np.zeros(len(self._space.cost_V), dtype=np.bool_)
        rows_P = self._rows.start + self._at_P
        left_PR = self._used_KR[self._at_P] - self._held_PR
        room_P = _room(self._space.inventory, rows_P, left_PR, self._space.request)
        freed_P = np.where(self._space.open_N[rows_P], room_P - self._slots_K(none_V)[self._at_P], 0)
        return np.bincount(self._victim_P, weights=freed_P, minlength=len(none_V)).astype(np.int64)

    def freed(self, victims: Sequence[int], mask_OB: BoolArray) -> tuple[IntArray, int]:
        """Return how much room some sets of victims free, and the work units spent; for plain gangs only.

        Args:
            victims: Candidates.
            mask_OB: Which of them are gone, by set.
        """
        space, sets = self._space, len(mask_OB)
        pairs = np.flatnonzero(np.isin(self._victim_P, victims) & space.open_N[self._rows.start + self._at_P])
        place_V = np.zeros(len(space.cost_V), dtype=np.int64)
        place_V[list(victims)] = np.arange(len(victims))
        at_P, held_PR = self._at_P[pairs], self._held_PR[pairs]
        starts = np.flatnonzero(np.diff(at_P, prepend=-1))
        row_K, used_KR = self._rows.start + at_P[starts], self._used_KR[at_P[starts]]
        before = int(_room(space.inventory, row_K, used_KR, space.request).sum())
        gains = []
        for mask_B in mask_OB:
            gone_PR = np.where(mask_B[place_V[self._victim_P[pairs]], None], held_PR, 0)
            left_KR = used_KR - np.add.reduceat(gone_PR, starts, axis=0)
            gains.append(int(_room(space.inventory, row_K, left_KR, space.request).sum()) - before)
        return np.array(gains, dtype=np.int64), sets * (len(pairs) + len(row_K))

    def losses(self, gone_V: BoolArray) -> IntArray:
        """Return how much room the domain would lose by keeping each of these victims; for plain gangs only."""
        used_KR = self._left_KR(gone_V)
        slots_K = self._slots_K(gone_V)
        pairs = np.flatnonzero(gone_V[self._victim_P])
        at_P = self._at_P[pairs]
        stays_P = _room(
            self._space.inventory, self._rows.start + at_P, used_KR[at_P] + self._held_PR[pairs], self._space.request
        )
        loss_P = slots_K[at_P] - np.where(self._space.open_N[self._rows.start + at_P], stays_P, 0)
        loss_V = np.bincount(self._victim_P[pairs], weights=loss_P, minlength=len(gone_V))
        return loss_V.astype(np.int64)

    def _left_KR(self, gone_V: BoolArray) -> IntArray:
        mask_P = gone_V[self._victim_P]
        used_KR = self._used_KR.copy()
        np.subtract.at(used_KR, self._at_P[mask_P], self._held_PR[mask_P])
        return used_KR

    def _slots_K(self, gone_V: BoolArray) -> IntArray:
        space = self._space
        room_K = _room(space.inventory, self._rows, self._left_KR(gone_V), space.request)
        slots_K = np.where(space.open_N[self._rows], room_K, 0)
        if space.requested.exclusive is not None:
            mask_P = gone_V[self._victim_P]
            busy_K = self._busy_K.copy()
            np.subtract.at(busy_K, self._at_P[mask_P], self._workers_P[mask_P])
            domain_K = space.tree.domain_LN[space.requested.exclusive, self._rows].astype(np.int64)
            domain_K -= domain_K.min(initial=0)
            slots_K[np.bincount(domain_K, weights=busy_K)[domain_K] > 0] = 0
        return slots_K
