"""Local search over rank orders: many swaps at once that bring communicating workers nearer to each other.

Shape suffixes: W workers, S places of the gang, K neighbours, L levels, B workers that want to move, T partners tried
for each, Q pairs.

A round takes the workers with the most expensive traffic and tries to swap each with workers around its farthest heavy
neighbour. All pairs are evaluated at once. Swaps with a gain are made, best first, as long as no two of a round affect
each other's neighbours, so that gains add up. A worker without a gain looks farther from its neighbour in later rounds,
``WINDOWS`` times; then it is skipped until something around it moves. The search is deterministic.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.metric import Metric
from polyreme_operator.placement.traffic import Graph
from polyreme_operator.types.inventory import RowArray

PARTNERS = 8
"""Partners that a worker tries in a round, half of them on each side of the neighbour."""
WINDOWS = 3
"""Rounds in which a worker tries partners, each time farther from its neighbour."""
ROUND_SHARE = 8
"""At most one in this many workers moves in a round, so that early gains guide later rounds."""
GAIN_MIN = 1e-9
"""Smallest gain of a swap relative to the cost of its worker's traffic, above rounding errors."""


@dataclasses.dataclass(slots=True)
class _State:
    """The current assignment, and the cost of each worker's traffic."""

    metric: Metric
    graph: Graph
    place_W: NDArray[np.intp]
    worker_S: NDArray[np.intp]
    code_W: NDArray[Any]
    cost_KW: NDArray[np.float64]
    cost_W: NDArray[np.float64]
    tried_W: RowArray
    """Windows in which a worker gained nothing since anything near it moved."""
    domain_W: RowArray | None
    """Domain that a worker must not leave; None without a restriction."""

    def refresh(self, worker_B: Any) -> None:
        """Recompute the cost of some workers' traffic."""
        near_KB = self.graph.neighbour_KW[:, worker_B]
        distance_KB = self.metric.between(self.code_W[worker_B], self.code_W[near_KB])
        cost_KB = self.graph.weights(worker_B) * distance_KB
        self.cost_KW[:, worker_B] = cost_KB
        self.cost_W[worker_B] = cost_KB.sum(axis=0)
        self.tried_W[worker_B] = 0


def improve(
    metric: Metric, graph: Graph, place_W: NDArray[np.intp], *, work_units: int, domain_S: RowArray | None = None
) -> tuple[NDArray[np.intp], int]:
    """Swap workers until no swap gains or the work units are spent.

    Args:
        metric: Distances between places.
        graph: Who talks to whom.
        place_W: The order to begin with; not changed.
        work_units: Distances that may be looked up. Without enough for one worker to move, nothing is looked up.
        domain_S: Domains whose workers may only be swapped with each other, by place, so that slices stay together.

    Returns:
        The order, and the work units that it cost.
    """
    neighbours, workers = graph.neighbour_KW.shape
    if not movers_max(neighbours, workers, work_units):
        return place_W, 0
    spent = neighbours * workers
    worker_S = np.empty_like(place_W)
    worker_S[place_W] = np.arange(workers)
    metric = metric.tabled()
    state = _State(
        metric=metric,
        graph=graph,
        place_W=place_W.copy(),
        worker_S=worker_S,
        code_W=metric.code_S[place_W],
        cost_KW=np.zeros((neighbours, workers)),
        cost_W=np.zeros(workers),
        tried_W=np.zeros(workers, dtype=np.int32),
        domain_W=None if domain_S is None else domain_S[place_W],
    )
    state.refresh(np.arange(workers))
    while True:
        wanting = min(max(1, workers // ROUND_SHARE), _affordable(neighbours, workers, work_units - spent))
        mover_B = np.flatnonzero((state.tried_W < WINDOWS) & (state.cost_W > 0))
        mover_B = mover_B[np.lexsort((-state.cost_W[mover_B], state.tried_W[mover_B]))][:wanting]
        if not len(mover_B):
            break
        pairs = _swaps(state, mover_B)
        state.tried_W[mover_B] += 1
        spent += 2 * neighbours * PARTNERS * len(mover_B)
        if len(pairs):
            spent += neighbours * _swap(state, pairs)
    return state.place_W, spent


def movers_max(neighbours: int, workers: int, work_units: int) -> int:
    """Return how many workers may try to move in the first round of a search; 0 if it can't begin."""
    left = work_units - neighbours * workers  # the search looks up everyone's traffic first
    return _affordable(neighbours, workers, left) if neighbours and left >= 0 else 0


def _affordable(neighbours: int, workers: int, work_units: int) -> int:
    """Return how many workers may try to move within the budget, including the recomputation of affected costs."""
    trying = 2 * neighbours * PARTNERS
    touching = 2 * neighbours * (neighbours + 1)
    most: int = max(0, work_units // (trying + touching), (work_units - neighbours * workers) // trying)
    return most


def _swap(state: _State, pairs: NDArray[np.intp]) -> int:
    """Make swaps; return how many workers' costs were recomputed."""
    first, second = pairs.T
    for array in (state.place_W, state.code_W):
        array[first], array[second] = array[second], array[first]
    moved = pairs.reshape(-1)
    state.worker_S[state.place_W[moved]] = moved
    touched_W = np.zeros(len(state.place_W), dtype=np.bool_)
    touched_W[moved] = True
    touched_W[state.graph.neighbour_KW[:, moved]] = True
    touched = np.flatnonzero(touched_W)
    state.refresh(touched)
    return len(touched)


def _swaps(state: _State, mover_B: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return pairs of workers whose swaps gain and don't affect each other."""
    graph, cost_W, workers = state.graph, state.cost_W, len(state.cost_W)
    farthest_B = graph.neighbour_KW[np.argmax(state.cost_KW[:, mover_B], axis=0), mover_B]
    half = PARTNERS // 2
    step_T = np.concatenate([np.arange(1, half + 1), np.arange(-half, 0)])
    window_B = state.tried_W[mover_B] * half
    at_BT = state.place_W[farthest_B][:, None] + step_T + np.sign(step_T) * window_B[:, None]
    partner_BT = state.worker_S[np.clip(at_BT, 0, workers - 1)]
    gain_BT = _gains(state, mover_B, partner_BT)
    if state.domain_W is not None:
        gain_BT[state.domain_W[mover_B][:, None] != state.domain_W[partner_BT]] = 0.0
    best_B = np.argmax(gain_BT, axis=1)
    every_B = np.arange(len(mover_B))
    gain_B, partner_B = gain_BT[every_B, best_B], partner_BT[every_B, best_B]
    order = np.argsort(-gain_B, kind="stable")
    order = order[gain_B[order] > GAIN_MIN * cost_W[mover_B[order]]]
    chosen = np.stack([mover_B[order], partner_B[order]], axis=1)
    return chosen[_apart(graph, chosen, workers)]


def _gains(state: _State, mover_B: NDArray[np.intp], partner_BT: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return what swapping each mover with each of its partners would save."""
    graph, metric, code_W = state.graph, state.metric, state.code_W
    mover_BT, mover_code_BT, partner_code_BT = mover_B[:, None], code_W[mover_B][:, None], code_W[partner_BT]
    saved_BT: NDArray[np.float64] = state.cost_W[mover_BT] + state.cost_W[partner_BT]
    near_KBT = graph.neighbour_KW[:, mover_B][:, :, None]
    # Each sits where the other one sat, also when they are neighbours.
    there_KBT = np.where(near_KBT == partner_BT, mover_code_BT, code_W[near_KBT])
    if graph.loops:
        there_KBT = np.where(near_KBT == mover_BT, partner_code_BT, there_KBT)
    saved_BT -= graph.weighed(mover_BT, metric.between(partner_code_BT, there_KBT))
    near_KBT = graph.neighbour_KW[:, partner_BT]
    there_KBT = np.where(near_KBT == mover_BT, partner_code_BT, code_W[near_KBT])
    if graph.loops:
        there_KBT = np.where(near_KBT == partner_BT, mover_code_BT, there_KBT)
    saved_BT -= graph.weighed(partner_BT, metric.between(mover_code_BT, there_KBT))
    return saved_BT


def _apart(graph: Graph, pairs: NDArray[np.intp], workers: int) -> NDArray[np.bool_]:
    """Keep pairs, best first, whose workers and their neighbours no better pair moves."""
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
