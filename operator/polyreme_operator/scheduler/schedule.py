"""One scheduling cycle: settle earlier intents, then repair, drain, resize, admit and grow.

A gang is placed whole or not at all. Every decision is charged to the cycle's own copies of inventory and quotas, so
that nothing is given away twice. It is written as intents before any job is touched.
"""

from __future__ import annotations

from polyreme_operator.scheduler.admit import admit_waiting
from polyreme_operator.scheduler.cycle import SchedulingCycle, Stopwatch
from polyreme_operator.scheduler.decisions import Batch, status_write
from polyreme_operator.scheduler.drain import drain
from polyreme_operator.scheduler.limits import Limits
from polyreme_operator.scheduler.repair import repair
from polyreme_operator.scheduler.resize import grow, resize
from polyreme_operator.scheduler.snapshot import ClusterSnapshot
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.intents import IntentState, intent_state
from polyreme_operator.types.views import JobView


def schedule(
    cluster: ClusterSnapshot, now_s: float, *, limits: Limits | None = None, stopwatch: Stopwatch | None = None
) -> Batch:
    """Decide admissions, moves and resizes for the cluster as it is."""
    entries = [entry for entry in cluster.intents.entries if entry.uid not in cluster.settled]
    open_ = [entry for entry in entries if intent_state(entry, cluster.jobs) is IntentState.OPEN]
    limits = limits or Limits()
    if open_:
        some = open_[: limits.admissions_max]
        return Batch(writes=tuple(_cancel(cluster.jobs[entry.uid]) for entry in some), again=True)
    cycle = SchedulingCycle(cluster, now_s, limits, stopwatch)
    repair(cycle)
    drain(cycle)
    resize(cycle)
    admit_waiting(cycle)
    grow(cycle)
    return cycle.decisions.batch(cluster.intents)


def _cancel(job: JobView) -> WriteStatus:
    """Cancel an admission that may still be in flight: the write raises the job's resource version."""
    after = job.status.model_copy(update={"cancelled_admissions": job.status.cancelled_admissions + 1})
    return status_write(job, after)
