"""Access to a queue: by the labels of a job's namespace, its priority, and the resources that it requests.

A queue and all cohorts above it must accept a job. One that is refused waits for no capacity, so it can neither hold
nor reserve anything. A job that was admitted before keeps its place, as under any other change of its queue.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.inventory import PODS
from polyreme_operator.types.label_selector import selects, words_of
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.views import JobView


def refusal(job: JobView, tree: QueueTree, namespaces: Mapping[str, Mapping[str, str]]) -> str:
    """Return why a job's queue does not accept it, and what to change; empty if it does.

    Args:
        job: The job.
        tree: The queues. One that is missing or invalid accepts every job, and admits none.
        namespaces: Labels of the namespaces, by name. Of one that is not known, nothing is assumed.
    """
    if job.spec is None:
        return ""
    path = [tree.views[name] for name in tree.path(job.spec.queue_name)]
    if all(queue.accepts_all for queue in path):
        return ""
    labels = namespaces.get(job.namespace)
    refusals = (_foreign(queue, job, labels) or _too_urgent(queue, job) for queue in path)
    return next(filter(None, refusals), "") or _unnamed(path, job, tree.limited(job.spec.queue_name))


def _foreign(queue: QueueView, job: JobView, labels: Mapping[str, str] | None) -> str:
    if not queue.namespaces or (labels is not None and selects(queue.namespaces, labels)):
        return ""
    return (
        f"queue {queue.name} does not accept jobs of namespace {job.namespace}: its namespaceSelector is "
        f"{words_of(queue.namespaces)}; change spec.queueName, or have the namespace labelled"
    )


def _too_urgent(queue: QueueView, job: JobView) -> str:
    if queue.priority_max is None or job.priority <= queue.priority_max:
        return ""
    field = "priority" if job.spec is None or not job.spec.priority_class_name else "priorityClassName"
    return (
        f"queue {queue.name} does not accept jobs of priority {job.priority}: its priorityMax is "
        f"{queue.priority_max}; change spec.{field}"
    )


def _unnamed(path: list[QueueView], job: JobView, named: frozenset[str]) -> str:
    """Refuse resources without a quota, if any queue says so; each pod takes one of ``pods`` without a request."""
    refusing = next((queue for queue in path if queue.refuses_unnamed), None)
    if refusing is None:
        return ""
    found = [resource for resource, amount in job.requests if amount > 0 and resource not in named | {PODS}]
    if not found:
        return ""
    return (
        f"queue {path[0].name} does not accept requests for {', '.join(sorted(found))}: neither it nor a parent has a "
        f"quota of that, and unnamedResources of {refusing.name} is Refuse; add a quota, or drop the request"
    )
