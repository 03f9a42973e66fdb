"""Which rank on which of the places that the gang has: those who send each other most sit nearest.

Shape suffixes: W workers, I items (blocks of workers), K neighbours.

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

from polyreme_operator.core.placement.search import distance, improve
from polyreme_operator.core.placement.traffic import Graph, Traffic, cost_of, graph_of, traffic_of
from polyreme_operator.core.placement.tree import Tree
from polyreme_operator.core.placement.wish import Wish
from polyreme_operator.types.inventory import GangRequest, RowArray

WORK_UNITS = 1_000_000
"""Distances that one search may look up."""
EXHAUSTIVE_MAX = 6
"""Workers up to which every order is tried: 720 of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A node for each worker."""

    rows_W: RowArray
    cost: int
    work_units: int


def ordered(tree: Tree, wish: Wish, request: GangRequest, slots_W: RowArray, *, work_units: int = WORK_UNITS) -> Order:
    """Give every worker one of the gang's places.

    Args:
        tree: Of domains.
        wish: Workers of a slice stay together in one domain of the slices' level.
        request: Layout and volumes of the gang.
        slots_W: Rows of its places, rising: a node with two workers is there twice.
        work_units: Distances that may be looked up.
    """
    traffic = traffic_of(request)
    best = Order(rows_W=slots_W, cost=cost_of(tree, traffic, slots_W), work_units=0)
    if best.cost == 0:
        return best
    by_rank, spent = best.cost, 0
    graph = graph_of(traffic)
    evaluation = max(1, graph.neighbour_KW.size)
    if len(slots_W) <= EXHAUSTIVE_MAX:
        return _best_of_all(tree, wish, traffic, graph, best)
    for rows_W in _packed(tree, wish, traffic, slots_W):
        if spent + evaluation > work_units:
            break
        spent += evaluation
        cost = cost_of(tree, traffic, rows_W)
        if cost < best.cost:
            best = Order(rows_W=rows_W, cost=cost, work_units=spent)
    slice_depth = wish.slice_depth if wish.slice_workers > 1 else None
    searched = improve(tree, graph, best.rows_W, work_units=work_units - spent, slice_depth=slice_depth)
    spent += searched.work_units
    cost = cost_of(tree, traffic, searched.rows_W)
    rows_W = searched.rows_W if cost < best.cost else best.rows_W
    best = Order(rows_W=rows_W, cost=min(cost, best.cost), work_units=spent)
    assert best.cost <= by_rank
    return best


def _best_of_all(tree: Tree, wish: Wish, traffic: Traffic, graph: Graph, by_rank: Order) -> Order:
    """Try every order of a few workers; the first of equals is taken, and by-rank order is the first of all."""
    workers = len(by_rank.rows_W)
    rows_PW = by_rank.rows_W[np.array(list(itertools.permutations(range(workers))))]
    if wish.slice_workers > 1:
        together_PS = tree.domain_LN[wish.slice_depth, rows_PW].reshape(len(rows_PW), -1, wish.slice_workers)
        rows_PW = rows_PW[(together_PS == together_PS[:, :, :1]).all(axis=(1, 2))]
    cost_P = sum(
        (weight_W * distance(tree, rows_PW, rows_PW[:, neighbour_W])).sum(axis=1)
        for neighbour_W, weight_W in zip(graph.neighbour_KW, graph.weight_KW, strict=True)
    )
    rows_W = rows_PW[int(np.argmin(cost_P))]
    cost = cost_of(tree, traffic, rows_W)
    spent = len(rows_PW) * graph.neighbour_KW.size
    rows_W = rows_W if cost < by_rank.cost else by_rank.rows_W
    return Order(rows_W=rows_W, cost=min(cost, by_rank.cost), work_units=spent)


def _packed(tree: Tree, wish: Wish, traffic: Traffic, slots_W: RowArray) -> Iterator[RowArray]:
    """Yield candidates, each a nesting of mesh axes packed into domains."""
    for sizes, nesting in _nestings(traffic, wish.slice_workers):
        index_W = _nested_indices(sizes, nesting)
        sequence_W = _pack_all(tree, slots_W, [sizes[axis] for axis in nesting])
        rows_W = np.empty_like(slots_W)
        rows_W[index_W] = slots_W[sequence_W]
        yield rows_W


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


def _pack_all(tree: Tree, slots_W: RowArray, sizes: list[int]) -> NDArray[np.intp]:
    """Return places in the order of a nesting: blocks of the first size, blocks of those of the second, and so on."""
    sequence = np.arange(len(slots_W), dtype=np.intp).reshape(-1, 1)
    for size in sizes:
        sequence = sequence[_pack(tree, slots_W[sequence[:, 0]], size)].reshape(-1, size * sequence.shape[1])
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
