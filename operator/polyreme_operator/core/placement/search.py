"""A local search over orders of ranks: swaps of workers that bring those who talk nearer, many at once.

Shape suffixes: W workers, K neighbours, L levels, B workers that want to move, T partners tried for each, Q pairs.

A round looks at the workers whose traffic costs most, and tries to swap each with workers that sit around its farthest
heavy neighbour. All pairs are weighed at once; the swaps that gain are made, best first, as long as no two of a round
touch each other's neighbours, so that gains add up. Nothing is drawn by chance: equal input, equal order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.core.placement.traffic import Graph
from polyreme_operator.core.placement.tree import Tree
from polyreme_operator.types.inventory import RowArray

PARTNERS = 8
"""Partners that a worker tries in a round."""
WINDOWS = 4
"""Rounds without gain, each farther from the neighbour, after which the search ends."""
ROUND_SHARE = 8
"""A round weighs at most this part of the work units, so that early gains steer later rounds."""
GAIN_MIN = 1e-9
"""Least gain of a swap, of what its workers' traffic costs: float64 rounding is no gain."""


@dataclasses.dataclass(frozen=True, slots=True)
class Searched:
    """An order, and what it cost to find."""

    rows_W: RowArray
    work_units: int


def distance(tree: Tree, here: RowArray, there: RowArray) -> NDArray[np.int64]:
    """Return the distances of pairs of nodes, given by row."""
    total = np.zeros(np.broadcast_shapes(here.shape, there.shape), dtype=np.int64)
    for rise, domain_N in zip(tree.rise_L, tree.domain_LN, strict=True):
        if rise:
            total += rise * (domain_N[here] != domain_N[there])
    return total


def improve(tree: Tree, graph: Graph, rows_W: RowArray, *, work_units: int, slice_depth: int | None = None) -> Searched:
    """Swap workers until nothing gains or the work units are spent.

    Args:
        tree: Of domains.
        graph: Who talks to whom.
        rows_W: The order to begin with; not changed.
        work_units: Distances that may be looked up.
        slice_depth: Swap only within domains of this level, so that slices stay together.
    """
    neighbours, workers = graph.neighbour_KW.shape
    spent, idle = 0, 0
    rows_W = rows_W.copy()
    round_units = max(1, work_units // ROUND_SHARE)
    while neighbours and idle < WINDOWS:
        wanting = min(workers, (round_units - neighbours * workers) // (2 * neighbours * PARTNERS))
        wanting = max(wanting, 1)
        needed = neighbours * workers + 2 * neighbours * PARTNERS * wanting
        if spent + needed > work_units:
            break
        spent += needed
        swaps = _swaps(tree, graph, rows_W, wanting=wanting, window=idle, slice_depth=slice_depth)
        idle = 0 if len(swaps) else idle + 1
        first, second = swaps.T
        rows_W[first], rows_W[second] = rows_W[second], rows_W[first]
    return Searched(rows_W, spent)


def _swaps(
    tree: Tree, graph: Graph, rows_W: RowArray, *, wanting: int, window: int, slice_depth: int | None
) -> NDArray[np.intp]:
    """Return pairs of workers whose swaps gain and do not touch each other."""
    cost_KW = graph.weight_KW * distance(tree, rows_W[None, :], rows_W[graph.neighbour_KW])
    cost_W = cost_KW.sum(axis=0)
    mover_B = np.argsort(-cost_W, kind="stable")[:wanting]
    mover_B = mover_B[cost_W[mover_B] > 0]
    farthest_B = graph.neighbour_KW[np.argmax(cost_KW[:, mover_B], axis=0), mover_B]
    by_row_W = np.argsort(rows_W, kind="stable")
    position_W = np.empty_like(by_row_W)
    position_W[by_row_W] = np.arange(len(by_row_W))
    half = PARTNERS // 2
    step = np.arange(1, half + 1) + window * half
    around_T = np.concatenate([step, -step])
    at_BT = np.clip(position_W[farthest_B][:, None] + around_T, 0, len(rows_W) - 1)
    partner_BT = by_row_W[at_BT]
    pairs = np.stack([np.repeat(mover_B, PARTNERS), partner_BT.reshape(-1)], axis=1)
    gain_BT = _gains(tree, graph, rows_W, cost_W, pairs).reshape(partner_BT.shape)
    if slice_depth is not None:
        domain_W = tree.domain_LN[slice_depth, rows_W]
        gain_BT[domain_W[mover_B][:, None] != domain_W[partner_BT]] = 0.0
    choice_B = np.argmax(gain_BT, axis=1)[:, None]
    gain_B = np.take_along_axis(gain_BT, choice_B, axis=1)[:, 0]
    partner_B = np.take_along_axis(partner_BT, choice_B, axis=1)[:, 0]
    order = np.argsort(-gain_B, kind="stable")
    order = order[gain_B[order] > GAIN_MIN * cost_W[mover_B[order]]]
    pairs = np.stack([mover_B[order], partner_B[order]], axis=1)
    return pairs[_apart(graph, pairs, len(rows_W))]


def _gains(
    tree: Tree,
    graph: Graph,
    rows_W: RowArray,
    cost_W: NDArray[np.float64],
    pairs: NDArray[np.intp],
) -> NDArray[np.float64]:
    """Return what swapping each pair would save."""
    first_Q, second_Q = pairs.T
    saved_Q: NDArray[np.float64] = cost_W[first_Q] + cost_W[second_Q]
    for mover_Q, other_Q in ((first_Q, second_Q), (second_Q, first_Q)):
        neighbour_KQ = graph.neighbour_KW[:, mover_Q]
        there_KQ = rows_W[neighbour_KQ]
        # The other one sits where this one sat, and this one is where the other was.
        there_KQ = np.where(neighbour_KQ == other_Q, rows_W[mover_Q], there_KQ)
        there_KQ = np.where(neighbour_KQ == mover_Q, rows_W[other_Q], there_KQ)
        saved_Q -= (graph.weight_KW[:, mover_Q] * distance(tree, rows_W[other_Q][None, :], there_KQ)).sum(axis=0)
    return saved_Q


def _apart(graph: Graph, pairs: NDArray[np.intp], workers: int) -> NDArray[np.bool_]:
    """Keep pairs, best first, no worker of which a better pair moves, nor a neighbour of theirs."""
    number_Q = np.arange(len(pairs))
    best_W = np.full(workers, len(pairs))
    for side in (0, 1):
        np.minimum.at(best_W, pairs[:, side], number_Q)
    touched_Q = np.minimum(best_W[pairs[:, 0]], best_W[pairs[:, 1]])
    for side in (0, 1):
        near_KQ = best_W[graph.neighbour_KW[:, pairs[:, side]]]
        touched_Q = np.minimum(touched_Q, near_KQ.min(axis=0, initial=len(pairs)))
    untouched_Q: NDArray[np.bool_] = touched_Q >= number_Q
    return untouched_Q
