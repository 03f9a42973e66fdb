"""Index of TrainingQueues and of the namespaces' labels, which keeps up to date whether queues accept their jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.queueing.access import refusal
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.parse_settings import parse_queue
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.views import JobView


class QueueIndex(Kind):
    """Queues by name, their tree, and labels by namespace.

    Args:
        jobs: Jobs of the queues.
        default_unlimited: Whether the queue ``default`` admits jobs without limit while it does not exist.
    """

    def __init__(self, jobs: JobIndex, *, default_unlimited: bool) -> None:
        self.views: dict[str, QueueView] = {}
        self._jobs, self._default_unlimited = jobs, default_unlimited
        self.tree = self._build()
        self._namespaces: dict[str, dict[str, str]] = {}
        jobs.judge_by(self._refusal)

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a queue or a namespace."""
        del now_s
        if ref.kind == "Namespace":
            labels = {str(key): str(value) for key, value in (manifest["metadata"].get("labels") or {}).items()}
            return self._put_namespace(ref.name, labels)
        before, self.views[ref.name] = self.views.get(ref.name), parse_queue(manifest)
        if before is not None and _settled(before) == _settled(self.views[ref.name]):
            return Changes()
        return self._rebuild()

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a queue or a namespace."""
        if ref.kind == "Namespace":
            self._namespaces.pop(ref.name, None)
            return self._judge_again(self._jobs_in(ref.name))
        return Changes() if self.views.pop(ref.name, None) is None else self._rebuild()

    def _put_namespace(self, name: str, labels: dict[str, str]) -> Changes:
        if self._namespaces.get(name) == labels:
            return Changes()
        self._namespaces[name] = labels
        return self._judge_again(self._jobs_in(name))

    def _jobs_in(self, namespace: str) -> list[JobView]:
        return [job for job in self._jobs.views.values() if job.namespace == namespace]

    def _rebuild(self) -> Changes:
        self.tree = self._build()
        return self._judge_again(list(self._jobs.views.values())) | Changes(capacity=True)

    def _build(self) -> QueueTree:
        in_order = sorted(self.views.values(), key=lambda queue: queue.name)
        return QueueTree.of(in_order, default_unlimited=self._default_unlimited)

    def _refusal(self, job: JobView) -> str:
        return refusal(job, self.tree, self._namespaces)

    def _judge_again(self, jobs: Sequence[JobView]) -> Changes:
        changes = Changes()
        for job in jobs:
            if self._refusal(job) != job.queue_refusal:
                change = self._jobs.put(job)
                changes |= Changes(jobs={job.uid}, capacity=change.freed, asks=change.asks)
        return changes


def _settled(queue: QueueView) -> QueueView:
    """Return a queue without its status, which the operator writes itself."""
    return dataclasses.replace(queue, resource_version="", used_seconds=(), used_at_s=0.0)
