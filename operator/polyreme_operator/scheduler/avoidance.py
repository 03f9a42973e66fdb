"""Nodes that a job avoids because they failed its pods, and those where its own pods do not end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from polyreme_api.job.status import FailedNode
from polyreme_operator.reconcile import failed_nodes
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.scheduler.domains import known_rows, rows_of
from polyreme_operator.scheduler.gangs import gang_of
from polyreme_operator.types.inventory import BoolArray, Unschedulable
from polyreme_operator.types.views import JobView


def avoided_nodes(cycle: SchedulingCycle, job: JobView) -> list[BoolArray]:
    """Return the nodes that a waiting job avoids: first all of them, then those that may not be tried again yet.

    Empty for most jobs: nothing failed them.
    """
    assert job.spec is not None, "only jobs that can be read are placed"
    stuck = {pod.node for pod in cycle.cluster.pods.get(job.uid, {}).values() if pod.is_stuck(cycle.now_s)}
    failures = failed_nodes.remembered(job.status, cycle.now_s)
    if not failures:
        return [_marked(cycle, stuck)] if stuck else []
    retry_by_node = failed_nodes.avoided(failures, job.spec.failure_policy.backoff)
    early = {node: retry_s for node, retry_s in retry_by_node.items() if retry_s > cycle.now_s}
    if early:
        cycle.wake_at(min(early.values()))
    return [_marked(cycle, retry_by_node.keys() | stuck), _marked(cycle, early.keys() | stuck)]


def fits_elsewhere(
    cycle: SchedulingCycle, job: JobView, nodes: Sequence[str], failures: Collection[FailedNode]
) -> bool:
    """Tell whether a running gang would fit as a whole if it gave up its place, away from the nodes that failed it."""
    rows_W = rows_of(cycle.inventory, nodes)
    own_W = rows_W[rows_W >= 0]
    cycle.book(job, own_W, sign=-1)
    blocked_N = cycle.blocked_for(job) | _marked(cycle, {each.node for each in failures})
    found = cycle.place(gang_of(job, len(nodes)), blocked_N=blocked_N)
    cycle.book(job, own_W)
    return not isinstance(found, Unschedulable)


def _marked(cycle: SchedulingCycle, nodes: Collection[str]) -> BoolArray:
    marked_N = np.zeros(len(cycle.inventory.names), dtype=np.bool_)
    marked_N[known_rows(cycle.inventory, nodes)] = True
    return marked_N
