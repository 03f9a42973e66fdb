"""Index of what the API server adds to new pods: LimitRanges by namespace, RuntimeClasses by name.

It keeps the requests of jobs up to date, by which nodes and queues are charged before a pod is created.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from polyreme_api.job import TrainingJobSpec
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.cache.pods import is_worker_of
from polyreme_operator.types.admission import (
    Additions,
    parse_limit_range,
    parse_runtime_class,
    runtime_class_of,
    worker_requests,
)
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.inventory import Requests
from polyreme_operator.types.resources import larger
from polyreme_operator.types.views import JobView, PodView


class AdmissionIndex(Kind):
    """Additions by namespace and runtime class."""

    def __init__(self, jobs: JobIndex) -> None:
        self._jobs = jobs
        self._limit_ranges: dict[str, dict[str, Requests]] = defaultdict(dict)
        self._overheads: dict[str, Requests] = {}

    def of(self, namespace: str, spec: TrainingJobSpec) -> Additions:
        """Return what the pods of a job get. Of several LimitRanges any may be applied first: the largest counts."""
        defaults: Requests = ()
        for given in self._limit_ranges.get(namespace, {}).values():
            defaults = larger(defaults, given)
        return Additions(defaults=defaults, overhead=self._overheads.get(runtime_class_of(spec), ()))

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a LimitRange or a RuntimeClass."""
        del now_s
        if ref.kind == "LimitRange":
            self._limit_ranges[ref.namespace][ref.name] = parse_limit_range(manifest)
        else:
            self._overheads[ref.name] = parse_runtime_class(manifest)
        return self._recount(ref)

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a LimitRange or a RuntimeClass."""
        if ref.kind == "LimitRange":
            self._limit_ranges[ref.namespace].pop(ref.name, None)
            if not self._limit_ranges[ref.namespace]:
                del self._limit_ranges[ref.namespace]
        else:
            self._overheads.pop(ref.name, None)
        return self._recount(ref)

    def learn(self, job: JobView | None, pods: Iterable[PodView]) -> Changes:
        """Charge what new pods of a job were stored with, if it is more than was known before they were created.

        Anything may add to a pod at its creation, a webhook for one. A pod that was resized since then doesn't show it.
        """
        if job is None or job.spec is None:
            return Changes()
        stored = job.stored
        for pod in pods:
            if pod.requests != job.requests and pod.generation <= 1 and is_worker_of(job, pod):
                stored = larger(stored, pod.requests)
        requests = larger(job.requests, stored)
        return Changes() if requests == job.requests else self._put(job, requests, stored)

    def _recount(self, ref: ObjectRef) -> Changes:
        changes = Changes()
        for job in list(self._jobs.views.values()):
            if job.spec is not None and _concerns(ref, job.namespace, job.spec):
                requests = worker_requests(job.spec, self.of(job.namespace, job.spec))
                if (requests, ()) != (job.requests, job.stored):
                    changes |= self._put(job, requests, ())
        return changes

    def _put(self, job: JobView, requests: Requests, stored: Requests) -> Changes:
        change = self._jobs.put(dataclasses.replace(job, requests=requests, stored=stored))
        return Changes(jobs={job.uid}, capacity=change.freed, asks=change.asks)


def _concerns(ref: ObjectRef, namespace: str, spec: TrainingJobSpec) -> bool:
    """Tell whether a LimitRange or a RuntimeClass may change what a job's pods get."""
    return namespace == ref.namespace if ref.kind == "LimitRange" else runtime_class_of(spec) == ref.name
