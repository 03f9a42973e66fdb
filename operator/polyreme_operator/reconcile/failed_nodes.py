"""Memory of the nodes on which a job's pods could not start, or did not end: which it avoids, and for how long.

A node that failed a worker is avoided by every worker of the job for an hour, wherever another node has room. Where
none has, it is tried again after a wait that doubles with each failure. A worker that failed on three nodes shows that
its surroundings are at fault, so then the whole gang is placed again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.policy import Backoff
from polyreme_api.job.status import FAILED_NODES_MAX, AttemptStatus, FailedNode
from polyreme_api.times import rfc3339
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.timestamps import parse_time_or

REMEMBERED_S = 3_600.0
"""How long a node is avoided after it failed last."""
FAILURES_MAX = 3
"""Failures of one worker, mostly on as many nodes, after which the whole gang is placed again if it fits elsewhere."""
CAUSES = frozenset({Cause.POD_REJECTED, Cause.POD_STUCK, Cause.START_TIMED_OUT, Cause.UNSCHEDULABLE})
"""Causes for which a node is remembered, and that say that a pod did not start."""


def remembered(status: TrainingJobStatus, now_s: float) -> list[FailedNode]:
    """Return the failures that are not too old. A time in the future was written by a clock that is ahead of ours."""
    return [each for each in status.failed_nodes if now_s - parse_time_or(each.at, now_s) < REMEMBERED_S]


def with_failures(
    status: TrainingJobStatus, attempt: AttemptStatus, indices: Collection[int], cause: Cause, now_s: float
) -> list[FailedNode]:
    """Return the remembered failures after workers of an attempt have failed on their nodes."""
    known = {(each.node, each.index): each for each in remembered(status, now_s)}
    nodes = attempt.placement.node_by_index()
    for index in sorted(indices):
        # Taken out first: the newest comes last.
        before = known.pop((nodes[index], index), None)
        known[nodes[index], index] = FailedNode(
            node=nodes[index],
            index=index,
            cause=cause.value,
            at=rfc3339(now_s),
            failures=1 if before is None else before.failures + 1,
        )
    return list(known.values())[-FAILED_NODES_MAX:]


def avoided(failures: Collection[FailedNode], backoff: Backoff) -> Mapping[str, float]:
    """Return the nodes to avoid, each with the time from which it may be tried again if no other node has room."""
    found: dict[str, float] = {}
    for each in failures:
        wait_s = min(float(backoff.max_seconds), backoff.initial_seconds * 2.0 ** min(each.failures - 1, 30))
        found[each.node] = max(found.get(each.node, 0.0), parse_time_or(each.at, 0.0) + wait_s)
    return found


def has_failed_widely(failures: Collection[FailedNode], indices: Collection[int]) -> bool:
    """Tell whether one of these workers has failed so often that its whole gang had better be placed again.

    After that, it takes as many more.
    """
    counts = (sum(each.failures for each in failures if each.index == index) for index in indices)
    return any(count and count % FAILURES_MAX == 0 for count in counts)
