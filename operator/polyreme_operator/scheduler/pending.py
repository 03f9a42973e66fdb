"""Messages of pending reasons, which say what would let a job run."""

from __future__ import annotations

from polyreme_operator.queueing.tree import DEFAULT_QUEUE, QueueTree
from polyreme_operator.scheduler.cycle import SchedulingCycle
from polyreme_operator.types.queues import StopPolicy
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import Pending
from polyreme_operator.types.views import JobView

DETAILED_REASONS_MAX = 100
"""The first jobs of a queue get messages with current numbers; later ones get a constant message."""


def over_quota(cycle: SchedulingCycle, job: JobView, workers: int) -> str | None:
    """Return which quota forbids this many more workers; None if none does."""
    assert job.spec is not None, "only jobs that can be read are placed"
    queue = job.spec.queue_name
    for resource, amount in job.requests:
        room = cycle.quotas.room(queue, resource)
        if room is not None and amount * workers > room:
            return f"needs {amount * workers} of {resource}; queue {queue} has {_left(cycle, queue, resource, room)}"
    return None


def beyond_quota(cycle: SchedulingCycle, job: JobView, workers: int) -> str | None:
    """Return which quota this many workers could not have even if no other job ran; None if they could."""
    assert job.spec is not None, "only jobs that can be read are placed"
    queue = job.spec.queue_name
    for resource, amount in job.requests:
        most = cycle.unused_quotas.room(queue, resource)
        if most is not None and amount * workers > most:
            limit = f"queue {queue} can never have more than {most}"
            return f"needs {amount * workers} of {resource}; {limit}: {_advice(job)}"
    return None


def _advice(job: JobView) -> str:
    fewer = "" if job.spec is None or job.spec.workers.replicas == 1 else "workers.replicas, "
    return f"change {fewer}spec.queueName or the quota"


def _left(cycle: SchedulingCycle, queue: str, resource: str, room: int) -> str:
    own = cycle.cluster.tree.view(queue).quota(resource)
    used = cycle.quotas.used(queue, resource)
    if own is None:
        return f"{room} left of what others lend"
    return f"{room} left: it holds {used}, its quota is {own.nominal}"


def closed(tree: QueueTree, queue: str) -> Pending | None:
    """Return why a queue admits no jobs; None if it does."""
    if not tree.in_order(queue):
        problem = tree.problems.get(queue)
        words = f"there is no TrainingQueue {queue}; create it or change spec.queueName"
        if queue == DEFAULT_QUEUE:
            words += ", or set queues.default: Unlimited in the chart"
        return Pending(Reason.QUEUE_MISSING, words if problem is None else problem.message)
    policy = tree.stop_policy(queue)
    if policy is StopPolicy.NONE:
        return None
    holder = next(name for name in tree.path(queue) if tree.view(name).stop_policy is not StopPolicy.NONE)
    return Pending(
        Reason.QUEUE_STOPPED, f"queue {holder} admits nothing: its stopPolicy is {tree.view(holder).stop_policy}"
    )


def without_details(pending: Pending, queue: str) -> Pending:
    """Return the reason with the constant message of jobs far from the head."""
    words = f"waits after the first {DETAILED_REASONS_MAX} jobs of queue {queue}"
    return Pending(pending.reason, words, permanent=pending.permanent)
