"""The least that any choice of whole gangs costs, by an integer program of HiGHS: what no search can be below.

Shape suffixes: V gangs in a block, K nodes of the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from polyreme_operator.types.queues import Running

LIMIT_S = 20.0
"""Of one program. One that ends before it is solved gives its lower bound."""


def least_cost(jobs: Sequence[Running], rows: range, nodes: int, now_s: float) -> float:
    """Return the least cost of gangs that leave so many whole nodes of a range empty, whatever the quotas say.

    A gang is taken whole or not at all (the part of it that lies elsewhere included), and a node is empty when every
    gang on it is taken. All nodes are in use.
    """
    inside = [(job, sorted({row - rows.start for row in job.rows_W.tolist() if row in rows})) for job in jobs]
    inside = [(job, held) for job, held in inside if held]
    pairs = [(at, row) for at, (_, held) in enumerate(inside) for row in held]
    gangs, at = len(inside), np.arange(len(pairs))
    cost_V = [job.devices * (now_s - job.started_s) for job, _ in inside]
    columns = np.array([[gangs + row, gang] for gang, row in pairs]).reshape(-1)
    empty_if_taken = csr_array(
        (np.tile([1.0, -1.0], len(pairs)), (np.repeat(at, 2), columns)), shape=(len(pairs), gangs + len(rows))
    )
    enough = np.concatenate([np.zeros(gangs), np.ones(len(rows))])[None, :]
    solved = milp(
        np.concatenate([cost_V, np.zeros(len(rows))]),
        constraints=[LinearConstraint(empty_if_taken, -np.inf, 0), LinearConstraint(enough, nodes, np.inf)],
        integrality=np.ones(gangs + len(rows)),
        bounds=Bounds(0, 1),
        options={"time_limit": LIMIT_S},
    )
    return float(solved.mip_dual_bound)


def least_of(
    jobs: Sequence[Running], blocks: Iterable[tuple[float, range]], nodes: int, *, found: float, now_s: float
) -> float:
    """Return the least of all blocks, or ``found`` where no block costs less.

    Args:
        jobs: All gangs.
        blocks: A lower bound of each block, rising, and its rows; one whose bound is not below the best is not solved.
        nodes: Whole nodes that are needed in one block.
        found: Cost of a choice that is known.
        now_s: The present.
    """
    best = found
    for bound, rows in blocks:
        if bound >= best:
            break
        best = min(best, least_cost(jobs, rows, nodes, now_s))
    return best
