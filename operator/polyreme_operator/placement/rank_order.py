"""Assigns ranks to the places of a gang, so that ranks with the most traffic are nearest to each other.

Shape suffixes: W workers, S places of the gang, P permutations, K neighbours, I items (blocks of workers).

By-rank order (consecutive indices along the rows of the tree) is the first candidate, and no answer is ever worse. The
others *pack*: mesh axes are nested by what they send, heaviest innermost; blocks of the innermost axis are cut whole
out of hosts, what is left over in a host out of its rack, and so on upwards, so that few groups straddle a border; then
blocks of blocks likewise. The cheapest candidate is improved by swaps (``search.py``) until its work units are spent.
Gangs of up to ``EXHAUSTIVE_MAX`` workers try every order, so that theirs is the best there is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.search import Metric, improve, metric_of
from polyreme_operator.placement.topology_request import TopologyRequest
from polyreme_operator.placement.traffic import Traffic, cost_of, graph_of, traffic_of
from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import GangRequest, RowArray

WORK_UNITS_PER_WORKER = 25
"""Distance lookups of a search, per worker of the gang."""
EXHAUSTIVE_MAX = 6
"""Workers up to which every order is tried: 720 of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A node for each worker."""

    rows_W: RowArray
    cost: int
    work_units: int


def ordered(
    tree: Tree, requested: TopologyRequest, request: GangRequest, slots_S: RowArray, *, work_units: int | None = None
) -> Order:
    """Assign every worker to one of the gang's places.

    Args:
        tree: Of domains.
        requested: Workers of a slice stay together in one domain of the slices' level.
        request: Layout and volumes of the gang.
        slots_S: Rows of its places, rising: a node with two workers is there twice.
        work_units: Distances that may be looked up; None: so many for each worker.
    """
    traffic = traffic_of(request)
    by_rank = Order(rows_W=slots_S, cost=cost_of(tree, traffic, slots_S), work_units=0)
    metric = metric_of(tree, slots_S) if by_rank.cost else None
    if metric is None:
        return by_rank
    if len(slots_S) <= EXHAUSTIVE_MAX:
        found = _best_of_all(tree, requested, traffic, metric, slots_S)
    else:
        left = WORK_UNITS_PER_WORKER * request.workers if work_units is None else work_units
        found = _searched(tree, requested, traffic, metric, by_rank, work_units=left)
    if found.cost >= by_rank.cost:
        return dataclasses.replace(by_rank, work_units=found.work_units)
    return found


def _searched(
    tree: Tree, requested: TopologyRequest, traffic: Traffic, metric: Metric, by_rank: Order, *, work_units: int
) -> Order:
    """Choose the cheapest candidate and improve it."""
    slots_S, lowest, spent = by_rank.rows_W, by_rank.cost, 0
    best_W = np.arange(len(slots_S), dtype=np.intp)
    for place_W in _packed(tree, requested, traffic, slots_S):
        if spent + traffic.lookups > work_units:
            break
        spent += traffic.lookups
        cost = cost_of(tree, traffic, slots_S[place_W])
        if cost < lowest:
            best_W, lowest = place_W, cost
    domain_S = tree.domain_LN[requested.slice_depth, slots_S] if requested.slice_workers > 1 else None
    place_W, more = improve(metric, graph_of(traffic), best_W, work_units=work_units - spent, domain_S=domain_S)
    cost = cost_of(tree, traffic, slots_S[place_W])
    if cost >= lowest:  # where the graph leaves traffic out, a gain by the graph may be a loss
        place_W, cost = best_W, lowest
    return Order(rows_W=slots_S[place_W], cost=cost, work_units=spent + more)


def _best_of_all(tree: Tree, requested: TopologyRequest, traffic: Traffic, metric: Metric, slots_S: RowArray) -> Order:
    """Try every order of a few workers; by-rank order is tried first, and the first of equals wins."""
    graph = graph_of(traffic)
    place_PW = np.array(list(itertools.permutations(range(len(slots_S)))), dtype=np.intp)
    if requested.slice_workers > 1:
        together_PS = tree.domain_LN[requested.slice_depth, slots_S][place_PW].reshape(
            len(place_PW), -1, requested.slice_workers
        )
        place_PW = place_PW[(together_PS == together_PS[:, :, :1]).all(axis=(1, 2))]
    code_PW = metric.code_S[place_PW]
    cost_P = np.zeros(len(place_PW))
    for neighbour_W, weight_W in zip(graph.neighbour_KW, graph.weight_KW, strict=True):
        cost_P += (weight_W * metric.between(code_PW, code_PW[:, neighbour_W])).sum(axis=1)
    rows_W = slots_S[place_PW[int(np.argmin(cost_P))]]
    spent = code_PW.size * len(graph.neighbour_KW)
    return Order(rows_W=rows_W, cost=cost_of(tree, traffic, rows_W), work_units=spent)


def _packed(tree: Tree, requested: TopologyRequest, traffic: Traffic, slots_S: RowArray) -> Iterator[NDArray[np.intp]]:
    """Yield candidates, each a nesting of mesh axes packed into domains."""
    for sizes, nesting in _nestings(traffic, requested.slice_workers):
        index_W = _nested_indices(sizes, nesting)
        place_W = np.empty(len(slots_S), dtype=np.intp)
        place_W[index_W] = _pack_all(tree, slots_S, [sizes[axis] for axis in nesting])
        yield place_W


def _nestings(traffic: Traffic, slice_workers: int) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yield degrees of a mesh between workers, fastest first, and an order of its axes, innermost first."""
    layout, volumes = traffic.layout, traffic.sent_by_axis
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for axes in (("ep", "edp", "pp"), ("tp", "cp", "dp", "pp")):
        degrees = _between_workers([getattr(layout, axis) for axis in axes], traffic.devices * slice_workers)
        if degrees is None:
            continue
        named = [(degree, axis) for degree, axis in zip(degrees, axes, strict=True) if degree > 1]
        sizes = [degree for degree, _ in named]
        # Heaviest innermost; of equals the axis that varies faster.
        heavy = sorted(range(len(named)), key=lambda at: -volumes.get(named[at][1], 0))
        if slice_workers > 1:  # a slice is a block of consecutive indices, whatever is heavy
            sizes, heavy = [slice_workers, *sizes], [0, *(at + 1 for at in heavy)]
        for nesting in (tuple(range(len(sizes))), tuple(heavy)):
            if (tuple(sizes), nesting) not in seen:
                seen.add((tuple(sizes), nesting))
                yield sizes, nesting


def _between_workers(degrees: list[int], ranks: int) -> list[int] | None:
    """Divide the degrees of a mesh, fastest first, by the ranks of a worker; None if a worker cuts through an axis."""
    left, between = ranks, []
    for degree in degrees:
        if left % degree == 0:
            left //= degree
            between.append(1)
        elif degree % left == 0:
            between.append(degree // left)
            left = 1
        else:
            return None
    return between if left == 1 else None


def _nested_indices(sizes: list[int], nesting: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the worker's index at each place of a nesting."""
    axes = len(sizes)
    index = np.arange(int(np.prod(sizes, dtype=np.int64)), dtype=np.intp).reshape(sizes[::-1])
    return index.transpose([axes - 1 - axis for axis in reversed(nesting)]).reshape(-1)


def _pack_all(tree: Tree, slots_S: RowArray, sizes: list[int]) -> NDArray[np.intp]:
    """Return places in the order of a nesting: blocks of the first size, blocks of those of the second, and so on."""
    sequence = np.arange(len(slots_S), dtype=np.intp).reshape(-1, 1)
    for size in sizes:
        sequence = sequence[_pack(tree, slots_S[sequence[:, 0]], size)].reshape(-1, size * sequence.shape[1])
    return sequence.reshape(-1)


def _pack(tree: Tree, row_I: RowArray, size: int) -> NDArray[np.intp]:
    """Cut items, sorted by row, into blocks: whole out of hosts first, what is left out of the domains above."""
    pool = np.arange(len(row_I), dtype=np.intp)
    blocks: list[NDArray[np.intp]] = []
    for domain_N in tree.domain_LN[::-1]:
        if not len(pool):
            break
        domain = domain_N[row_I[pool]]
        starts = np.flatnonzero(np.diff(domain, prepend=-1))
        counts = np.diff(np.append(starts, len(pool)))
        place = np.arange(len(pool)) - np.repeat(starts, counts)
        whole = place < np.repeat(counts // size * size, counts)
        blocks.append(pool[whole].reshape(-1, size))
        pool = pool[~whole]
    blocks.append(pool.reshape(-1, size))
    block = np.concatenate(blocks)
    return block[np.argsort(block[:, 0], kind="stable")]
