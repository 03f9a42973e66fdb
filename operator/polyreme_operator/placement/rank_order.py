"""Assigns ranks to the places of a gang, so that ranks with the most traffic are nearest to each other.

Shape suffixes: W workers, S places of the gang, P permutations, K neighbours, I items (blocks of workers), A domains.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.metric import Metric, changes, lengths, metric_of
from polyreme_operator.placement.search import improve, movers_max
from polyreme_operator.placement.topology_request import TopologyRequest
from polyreme_operator.placement.traffic import Traffic, cost_of, graph_of, traffic_of
from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import GangRequest, RowArray

WORK_UNITS_PER_WORKER = 25
"""Distance lookups of a search, per worker of the gang."""
EXHAUSTIVE_MAX = 6
"""Workers up to which every order is tried: 720 of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slices:
    """Consecutive workers that stay in one domain."""

    workers: int
    """Of each slice."""
    domain_S: RowArray
    """Domain of each place."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A place for each worker."""

    place_W: NDArray[np.intp]
    cost: int
    """0 too where the tree needs codes that are too long, so that ranks are not searched."""
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
    metric = metric_of(tree, slots_S) if traffic.links or traffic.exchanges else None
    by_rank = Order(place_W=np.arange(len(slots_S), dtype=np.intp), cost=0, work_units=0)
    if metric is not None:
        by_rank = dataclasses.replace(by_rank, cost=cost_of(traffic, metric, by_rank.place_W))
    if metric is None or not by_rank.cost:
        return by_rank
    slices = None
    if requested.slice_workers > 1:
        slices = Slices(requested.slice_workers, tree.domain_LN[requested.slice_depth, slots_S])
    if len(slots_S) <= EXHAUSTIVE_MAX:
        found = _best_of_all(traffic, metric, slices)
    else:
        left = WORK_UNITS_PER_WORKER * request.workers if work_units is None else work_units
        found = _searched(traffic, metric, slices, by_rank, work_units=left)
    if found.cost >= by_rank.cost:
        return dataclasses.replace(by_rank, work_units=found.work_units)
    return found


def _searched(traffic: Traffic, metric: Metric, slices: Slices | None, by_rank: Order, *, work_units: int) -> Order:
    """Choose the cheapest candidate and improve it."""
    best_W, lowest, spent = by_rank.place_W, by_rank.cost, 0
    for place_W in _packed(traffic, metric, 1 if slices is None else slices.workers):
        if spent + traffic.lookups > work_units:
            break
        spent += traffic.lookups
        cost = cost_of(traffic, metric, place_W)
        if cost < lowest:
            best_W, lowest = place_W, cost
    left, domain_S = work_units - spent, None if slices is None else slices.domain_S
    if movers_max(traffic.neighbours, traffic.workers, left):
        place_W, more = improve(metric, graph_of(traffic), best_W, work_units=left, domain_S=domain_S)
        cost, spent = cost_of(traffic, metric, place_W), spent + more
        if cost < lowest:  # where the graph leaves traffic out, a gain by the graph may be a loss
            best_W, lowest = place_W, cost
    return Order(place_W=best_W, cost=lowest, work_units=spent)


def _best_of_all(traffic: Traffic, metric: Metric, slices: Slices | None) -> Order:
    """Try every order of a few workers; by-rank order is tried first, and the first of equals wins."""
    graph = graph_of(traffic)
    place_PW = np.array(list(itertools.permutations(range(len(metric.code_S)))), dtype=np.intp)
    if slices is not None:
        together_PS = slices.domain_S[place_PW].reshape(len(place_PW), -1, slices.workers)
        place_PW = place_PW[(together_PS == together_PS[:, :, :1]).all(axis=(1, 2))]
    code_PW = metric.code_S[place_PW]
    cost_P = np.zeros(len(place_PW))
    for neighbour_W, weight_W in zip(graph.neighbour_KW, graph.weight_KW, strict=True):
        cost_P += (weight_W * metric.between(code_PW, code_PW[:, neighbour_W])).sum(axis=1)
    place_W = place_PW[int(np.argmin(cost_P))]
    spent = code_PW.size * len(graph.neighbour_KW)
    return Order(place_W=place_W, cost=cost_of(traffic, metric, place_W), work_units=spent)


def _packed(traffic: Traffic, metric: Metric, slice_workers: int) -> Iterator[NDArray[np.intp]]:
    """Yield candidates, each a nesting of mesh axes packed into domains."""
    for sizes, nesting in _nestings(traffic, slice_workers):
        index_W = _nested_indices(sizes, nesting)
        place_W = np.empty(len(metric.code_S), dtype=np.intp)
        place_W[index_W] = _pack_all(metric, [sizes[axis] for axis in nesting])
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


def _pack_all(metric: Metric, sizes: list[int]) -> NDArray[np.intp]:
    """Return places in the order of a nesting: blocks of the first size, blocks of those of the second, and so on."""
    sequence = np.arange(len(metric.code_S), dtype=np.intp).reshape(-1, 1)
    for size in sizes:
        sequence = sequence[_pack(metric, metric.code_S[sequence[:, 0]], size)].reshape(-1, size * sequence.shape[1])
    return sequence.reshape(-1)


def _pack(metric: Metric, code_I: NDArray[Any], size: int) -> NDArray[np.intp]:
    """Cut items, sorted by code, into blocks: whole out of hosts first, what is left out of the domains above."""
    pool = np.arange(len(code_I), dtype=np.intp)
    blocks: list[NDArray[np.intp]] = []
    for bit, _ in metric.steps:
        if not len(pool):
            break
        start_A = np.flatnonzero(changes(code_I.take(pool) >> (bit.bit_length() - 1)))
        count_A = lengths(start_A, len(pool))
        if count_A.max() < size:
            continue
        whole = np.arange(len(pool)) < np.repeat(start_A + count_A // size * size, count_A)
        blocks.append(pool.take(np.flatnonzero(whole)).reshape(-1, size))
        pool = pool.take(np.flatnonzero(~whole))
    blocks.append(pool.reshape(-1, size))
    block = np.concatenate(blocks)
    at_I = np.full(len(code_I), -1, dtype=np.intp)
    at_I[block[:, 0]] = np.arange(len(block))
    return block[at_I[at_I >= 0]]
