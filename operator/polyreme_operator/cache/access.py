"""Index of namespaces' labels, which keeps up to date whether the queues accept their jobs."""

from __future__ import annotations

from polyreme_cluster.port import Manifest
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.queueing.access import refusal
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.views import JobView


class AccessIndex:
    """Labels by namespace, and the queues that look at them."""

    def __init__(self, jobs: JobIndex, tree: QueueTree) -> None:
        self._jobs, self._tree = jobs, tree
        self._namespaces: dict[str, dict[str, str]] = {}
        jobs.judge_by(self._refusal)

    def put_namespace(self, name: str, manifest: Manifest) -> Changes:
        """Add or replace a namespace."""
        labels = {str(key): str(value) for key, value in (manifest["metadata"].get("labels") or {}).items()}
        if self._namespaces.get(name) == labels:
            return Changes()
        self._namespaces[name] = labels
        return self._judge_again([job for job in self._jobs.views.values() if job.namespace == name])

    def remove_namespace(self, name: str) -> Changes:
        """Remove a namespace."""
        self._namespaces.pop(name, None)
        return self._judge_again([job for job in self._jobs.views.values() if job.namespace == name])

    def use(self, tree: QueueTree) -> Changes:
        """Use other queues from now on."""
        self._tree = tree
        return self._judge_again(list(self._jobs.views.values()))

    def _refusal(self, job: JobView) -> str:
        return refusal(job, self._tree, self._namespaces)

    def _judge_again(self, jobs: list[JobView]) -> Changes:
        changes = Changes()
        for job in jobs:
            if self._refusal(job) != job.queue_refusal:
                change = self._jobs.put(job)
                changes |= Changes(jobs={job.uid}, capacity=change.freed, asks=change.asks)
        return changes
