"""Pods: how they enter and leave the cache."""

from __future__ import annotations

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.admission import AdmissionIndex
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.cache.pods import PodIndex
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.parse import parse_foreign_pod, parse_pod


class PodKind(Kind):
    """Pods of jobs and of others."""

    def __init__(self, pods: PodIndex, jobs: JobIndex, admission: AdmissionIndex) -> None:
        self._pods, self._jobs, self._admission = pods, jobs, admission

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a pod."""
        pod = parse_pod(manifest, seen_s=now_s, known=self._pods.known(ref))
        job = None if pod is None else self._jobs.views.get(pod.job_uid)
        change = self._pods.put(ref, pod, job, foreign=lambda: parse_foreign_pod(manifest))
        return change.changes | self._admission.learn(job, () if pod is None else (pod,))

    def put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes | None:
        """Keep a worker as it was."""
        del why
        pod = self._pods.known(ref)
        return Changes() if pod is not None and pod.uid == str(manifest["metadata"].get("uid", "")) else None

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a pod."""
        return self._pods.remove(ref).changes
