"""Assigns the whole packs of a step to data-parallel ranks and microbatches, so that the slowest rank has less to do.

The order says which packs a step has; this says who reads which of them. It is a pure function of the packs' costs and
of how the trainer splits a step, so every rank, and every data engine, finds the same assignment without asking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.layout import packs_of_rank


@dataclasses.dataclass(frozen=True, slots=True)
class StepSplit:
    """How the trainer splits a step: each data-parallel rank has a run of packs, each microbatch a run of those."""

    data_ranks: int
    microbatches: int = 1


def assign_packs(costs: Sequence[int], split: StepSplit) -> list[int]:
    """Return, for each place of a step in the trainer's numbering, the order's pack that is read there.

    The packs are dealt in rounds, dearest first, one to each rank in a round: the dearest of a round goes to the rank
    that has the least so far. So packs of similar cost meet in a microbatch, and ranks have similar sums.

    Args:
        costs: Of the packs, by their number in the order.
        split: How the trainer splits the step.

    Returns:
        A permutation; the order itself, unless another makes the slowest ranks' work less. Numbers from the count of
        packs on are null packs, the last of each rank: they cost nothing.

    Raises:
        InvalidConfigError: If the packs can't be split like that.
    """
    ranks = split.data_ranks
    share = packs_of_rank(len(costs), ranks)
    if share % split.microbatches:
        raise InvalidConfigError(
            f"packs do not fit: {share} of each of {ranks} data-parallel ranks are not divisible by "
            f"{split.microbatches} microbatches",
            field="spec.training.packsPerStep",
        )
    costs = [*costs, *([0] * (share * ranks - len(costs)))]
    packs = len(costs)
    by_cost = sorted(range(packs), key=lambda pack: (-costs[pack], pack))
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for first in range(0, packs, ranks):
        emptiest = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, pack in zip(emptiest, by_cost[first : first + ranks], strict=True):
            held[rank].append(pack)
            load[rank] += costs[pack]
    dealt, ordered = [pack for mine in held for pack in mine], list(range(packs))
    return dealt if slowest([costs[pack] for pack in dealt], split) < slowest(costs, split) else ordered


def slowest(costs: Sequence[int], split: StepSplit) -> int:
    """Return the cost of a step: that of each microbatch's slowest rank, summed.

    Ranks that share experts wait for each other in every microbatch. Others meet at the end of a step, which then
    costs no more than this.

    Args:
        costs: Of the packs, in the trainer's numbering.
        split: How the trainer splits the step.
    """
    share = len(costs) // (split.data_ranks * split.microbatches)
    cells = [sum(costs[first : first + share]) for first in range(0, len(costs), share)]
    by_rank = [cells[first : first + split.microbatches] for first in range(0, len(cells), split.microbatches)]
    return sum(max(of) for of in zip(*by_rank, strict=True))
