"""Queues that hold and drain: what runs there is asked to checkpoint and stop."""

from __future__ import annotations

from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.quarantine import blaming
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.types.queues import StopPolicy


def drain(cycle: SchedulingCycle) -> None:
    """Ask every running job of a draining queue to stop."""
    tree = cycle.cluster.tree
    drained = {name for name in tree.views if tree.stop_policy(name) is StopPolicy.HOLD_AND_DRAIN}
    if not drained:
        return
    for uid in sorted(cycle.cluster.running):
        job = cycle.cluster.jobs[uid]
        if uid in cycle.decisions.changed or job.spec is None or job.spec.queue_name not in drained or job.spec.suspend:
            continue
        if job.status.preemption is not None:
            continue
        with blaming(uid):
            cycle.write(job, transition.stop_for_drain(job, queue=job.spec.queue_name, now_s=cycle.now_s))
