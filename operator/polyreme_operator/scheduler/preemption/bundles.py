"""The cheapest victims of a domain whose room is a sum over nodes: a knapsack over bundles of jobs that share nodes.

Shape suffixes: V candidates, B jobs of one bundle, O options of one bundle, P pairs of a candidate and a node.

Jobs that share a node may free it only together. Jobs that are connected by shared nodes form a *bundle*, and the room
that a choice frees is the sum over bundles. Of a bundle of up to ``SUBSETS_MAX`` jobs every subset is an option. Of a
larger one some sets are, each a part of the next: jobs in the order of their cost per freed room, and all jobs of one
node after another, in the order of what it costs to clear the node, where a job on several nodes counts a share. A
dynamic program takes one option of each bundle: where all bundles are small, no choice of victims costs less.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from polyreme_operator.scheduler.preemption.cost import Float64Array
from polyreme_operator.scheduler.preemption.space import Region
from polyreme_operator.types.inventory import BoolArray, IntArray

SUBSETS_MAX = 6
"""Most jobs of a bundle for all its subsets to be options: 64 of them."""
STEPS_MAX = 32
"""Sets of a larger bundle in one order."""
SHARES = (0.5, 1.0)
"""Exponents of the share of a job's room on a node: with less than 1, jobs on many nodes count more on each."""
CELLS_MAX = 4_000_000
"""Bundles x needed room, in workers, of the largest program; above it there is none."""
CELLS_PER_UNIT = 8
"""Cells of the program that take as long as one look-up of a node."""
GROUPING_UNITS = 20
"""Work units of grouping one pair."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The victims, and the work units that the choice took."""

    victims: list[int] | None
    """None if they would be too many to choose among, or if all together free too little."""
    work_units: int
    exact: bool = False
    """Whether no choice costs less."""


def cheapest_victims(region: Region, cost_V: Float64Array, needed: int, *, work_units: int) -> Choice:
    """Choose the victims in a region that free at least so much room.

    Args:
        region: Its room must be a sum over nodes (``plain``).
        cost_V: Cost of each candidate.
        needed: Room for the whole gang, in workers.
        work_units: Budget: a choice that would take more is not made.
    """
    spent = (3 + GROUPING_UNITS) * region.work_units
    if spent > work_units:
        return Choice(None, 0)
    bundles = _bundles(region)
    lacking = needed - region.room(np.zeros(len(cost_V), dtype=np.bool_))
    cells = len(bundles) * (lacking + 1)
    if cells > CELLS_MAX or spent + cells // CELLS_PER_UNIT > work_units:
        return Choice(None, spent)
    spent += cells // CELLS_PER_UNIT
    alone_V = region.freed_alone()
    options: list[tuple[list[list[int]], IntArray]] = []
    for bundle in bundles:
        if len(bundle) == 1:
            options.append(([bundle], alone_V[bundle]))
            continue
        if len(bundle) <= SUBSETS_MAX:
            mask_OB = _subsets(len(bundle))
        else:
            mask_OB, units = _steps(region, bundle, cost_V, lacking, work_units=work_units - spent)
            spent += units
        gain_O, units = region.freed(bundle, mask_OB)
        options.append(([[bundle[at] for at in np.flatnonzero(mask_B)] for mask_B in mask_OB], gain_O))
        spent += units
    exact = max(map(len, bundles), default=0) <= SUBSETS_MAX
    return Choice(_chosen(options, cost_V, lacking), spent, exact)


def _bundles(region: Region) -> list[list[int]]:
    """Return the candidates of a region that hold open nodes, grouped by shared nodes."""
    row_P, victim_P, _ = region.open_pairs()
    leader = {at: at for at in victim_P.tolist()}

    def find(at: int) -> int:
        while leader[at] != at:
            leader[at] = leader[leader[at]]
            at = leader[at]
        return at

    for first in np.flatnonzero(row_P[1:] == row_P[:-1]).tolist():
        one, other = find(int(victim_P[first])), find(int(victim_P[first + 1]))
        leader[max(one, other)] = min(one, other)
    found: dict[int, list[int]] = {}
    for at in sorted(leader):
        found.setdefault(find(at), []).append(at)
    return list(found.values())


def _subsets(count: int) -> BoolArray:
    """Return all subsets but the empty one."""
    number_O = np.arange(1, 1 << count)
    mask_OB: BoolArray = (number_O[:, None] >> np.arange(count) & 1).astype(np.bool_)
    return mask_OB


def _steps(
    region: Region, bundle: list[int], cost_V: Float64Array, lacking: int, *, work_units: int
) -> tuple[BoolArray, int]:
    """Return growing sets of the jobs of a large bundle, and the work units that they took."""
    row_P, victim_P, gain_P = region.open_pairs()
    mine_P = np.isin(victim_P, bundle)
    place_V = np.zeros(len(cost_V), dtype=np.int64)
    place_V[bundle] = np.arange(len(bundle))
    row_P, job_P, gain_P = row_P[mine_P], place_V[victim_P[mine_P]], gain_P[mine_P]
    gain_B, cost_B = np.bincount(job_P, weights=gain_P, minlength=len(bundle)), cost_V[bundle]
    with np.errstate(divide="ignore"):
        price_B = np.where(gain_B > 0, cost_B / gain_B, np.inf)
    rank_B = np.empty(len(bundle), dtype=np.int64)
    rank_B[np.argsort(price_B, kind="stable")] = np.arange(len(bundle))
    masks, spent = [_some(rank_B)], 0
    room_K = region.clearable_K()
    rounds = min(lacking, len(room_K))
    for exponent in SHARES:
        if spent + rounds * len(row_P) > work_units:
            break
        share_P = np.where(gain_P > 0, gain_P / np.maximum(gain_B[job_P], 1e-9), 1.0)
        masks.append(_some(_cleared(row_P, job_P, cost_B[job_P] * share_P**exponent, room_K, lacking)))
        spent += rounds * len(row_P)
    return np.concatenate(masks), spent


def _cleared(row_P: IntArray, job_P: IntArray, price_P: Float64Array, room_K: IntArray, lacking: int) -> IntArray:
    """Return after how many cleared nodes each job of a bundle is gone; -1 if it stays.

    Args:
        row_P: Node of each pair.
        job_P: Job of each pair.
        price_P: What it costs to free this part of the node.
        room_K: Room of each node once it is cleared.
        lacking: Room at which nodes are enough.
    """
    gone_B = np.full(int(job_P.max()) + 1, -1, dtype=np.int64)
    shared_K = np.bincount(row_P, minlength=len(room_K)) > 0
    while True:  # each round clears one node, so as many as room is lacking are enough
        stays_P = gone_B[job_P] < 0
        stays_K = np.bincount(row_P[stays_P], minlength=len(room_K)) > 0
        useful = np.flatnonzero(stays_K & (room_K > 0))
        if room_K[shared_K & ~stays_K].sum() >= lacking or not len(useful):
            return gone_B
        cost_K = np.bincount(row_P[stays_P], weights=price_P[stays_P], minlength=len(room_K))
        row = useful[np.argmin(cost_K[useful] / room_K[useful])]
        gone_B[job_P[stays_P & (row_P == row)]] = int(gone_B.max()) + 1


def _some(rank_B: IntArray) -> BoolArray:
    """Return growing sets of jobs in the order of their ranks, the whole last; jobs with a rank below 0 are in none."""
    ranks = int(rank_B.max()) + 1
    last_O = np.unique(np.linspace(0, ranks - 1, min(ranks, STEPS_MAX)).astype(np.int64))
    mask_OB: BoolArray = (rank_B >= 0) & (rank_B <= last_O[:, None])
    return mask_OB


def _chosen(options: list[tuple[list[list[int]], IntArray]], cost_V: Float64Array, lacking: int) -> list[int] | None:
    """Take at most one option of each bundle, so that they free enough at the least cost; None if none do."""
    least = np.full(max(0, lacking) + 1, np.inf)
    least[0] = 0.0
    taken: list[list[list[int]]] = []
    picks: list[tuple[IntArray, list[int]]] = []
    for sets, gain_O in options:
        costs = [float(cost_V[each].sum()) for each in sets]
        kept, gains = [], [0]
        for at in sorted(range(len(sets)), key=lambda at: (costs[at], -int(gain_O[at]), at)):
            if gain_O[at] > gains[-1]:  # a dearer option must free more
                kept.append(at)
                gains.append(int(gain_O[at]))
        before, pick = least, np.zeros(len(least), dtype=np.int64)
        for number, at in enumerate(kept, 1):
            gain = min(gains[number], len(least) - 1)
            with_it = np.concatenate([np.full(gain, before[0]), before[: len(least) - gain]]) + costs[at]
            better = with_it < least
            least = np.where(better, with_it, least)
            pick[better] = number
        taken.append([sets[at] for at in kept])
        picks.append((pick, [min(gain, len(least) - 1) for gain in gains]))
    if not np.isfinite(least[-1]):
        return None
    victims: list[int] = []
    left = len(least) - 1
    for sets, (pick, gains) in zip(reversed(taken), reversed(picks), strict=True):
        number = int(pick[left])
        if number:
            victims += sets[number - 1]
            left = max(0, left - gains[number])
    return sorted(victims)
