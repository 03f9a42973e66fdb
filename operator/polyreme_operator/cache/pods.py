"""Index of pods by job, and their usage of nodes and quotas.

A pod belongs to a job that exists in its namespace and controls it. Any other pod uses capacity of its node but no
quota, even if it names a job as its owner. Pods that outlive their job stay charged while they exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from polyreme_cluster.port import ObjectRef
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.usage import UsageLedger, pod_charge
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.views import ForeignPod, JobView, PodPhase, PodView


@dataclasses.dataclass(frozen=True, slots=True)
class PodChange:
    """Effects of a pod's change."""

    jobs: frozenset[str] = frozenset()
    """UIDs of the jobs to which it belongs or belonged."""
    freed: bool = False
    """Whether usage of jobs has decreased, or a job's last pod is gone."""
    left: tuple[ForeignPod, ...] = ()
    """What foreign pods no longer use."""

    @property
    def changes(self) -> Changes:
        """The effects on all that is decided."""
        return Changes(jobs=set(self.jobs), capacity=self.freed, left=self.left)

    def __or__(self, other: PodChange) -> PodChange:
        """Return the union of both."""
        return PodChange(jobs=self.jobs | other.jobs, freed=self.freed or other.freed, left=self.left + other.left)


class PodIndex:
    """Pods of jobs, and the usage of foreign pods."""

    def __init__(self, nodes: NodeTable, ledger: UsageLedger) -> None:
        self.by_job: dict[str, dict[ObjectRef, PodView]] = {}
        """By UID of the job."""
        self._jobs: dict[ObjectRef, str] = {}
        self._foreign: dict[ObjectRef, ForeignPod] = {}
        self._claims: dict[str, dict[ObjectRef, PodView]] = {}
        """Pods whose owner is an unknown job or one in another namespace, by UID of that job."""
        self._claimed: dict[ObjectRef, str] = {}
        self._nodes, self._ledger = nodes, ledger

    def put(
        self, ref: ObjectRef, pod: PodView | None, job: JobView | None, *, foreign: Callable[[], ForeignPod | None]
    ) -> PodChange:
        """Add or replace a pod.

        Args:
            ref: Which pod.
            pod: The pod as a worker; None if no job controls it.
            job: The job with the UID that it names, if that is known.
            foreign: Returns its usage as a foreign pod.
        """
        if pod is not None and self._is_worker(pod, job):
            return self._put_worker(ref, pod)
        change = self._drop_worker(ref) | self._put_foreign(ref, foreign())
        if pod is not None:
            self._claims.setdefault(pod.job_uid, {})[ref] = pod
            self._claimed[ref] = pod.job_uid
        return change

    def remove(self, ref: ObjectRef) -> PodChange:
        """Remove a pod."""
        return self._drop_worker(ref) | self._put_foreign(ref, None)

    def adopt(self, job: JobView) -> PodChange:
        """Assign earlier pods to a job that has become known."""
        change = PodChange()
        for ref, pod in list(self._claims.get(job.uid, {}).items()):
            if self._is_worker(pod, job):
                change |= self._put_worker(ref, pod)
        return change

    def known(self, ref: ObjectRef) -> PodView | None:
        """Return a cached pod of a job."""
        return self.by_job.get(self._jobs.get(ref, ""), {}).get(ref)

    def runs_on(self, node: str, jobs: Iterable[str]) -> bool:
        """Tell whether a worker of any of these jobs runs on a node."""
        pods = (pod for uid in jobs for pod in self.by_job.get(uid, {}).values())
        return any(pod.node == node and pod.phase is PodPhase.RUNNING for pod in pods)

    def others_on(self, node: str) -> list[ObjectRef]:
        """Return the pods on a node that are no workers and would leave it if it were emptied."""
        return sorted(ref for ref, pod in self._foreign.items() if pod.node == node and not pod.stays)

    def note_bound(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Remember that a pod was bound until the watch shows it, so that it is not bound twice."""
        pods = self.by_job.get(self._jobs.get(ref, ""), {})
        pod = pods.get(ref)
        if pod is not None and pod.uid == uid and not pod.node and pod.wanted == node:
            pods[ref] = dataclasses.replace(pod, node=node)

    def _is_worker(self, pod: PodView, job: JobView | None) -> bool:
        if job is not None:
            return is_worker_of(job, pod)
        # The job was deleted while it had pods.
        known = next(iter(self.by_job.get(pod.job_uid, {}).values()), None)
        return known is not None and (pod.namespace, pod.job_name) == (known.namespace, known.job_name)

    def _put_worker(self, ref: ObjectRef, pod: PodView) -> PodChange:
        before = self.by_job.get(pod.job_uid, {}).get(ref)
        change = PodChange(jobs=frozenset({pod.job_uid}))
        if before is None:
            change |= self._drop_worker(ref) | self._put_foreign(ref, None)
        self.by_job.setdefault(pod.job_uid, {})[ref] = pod
        self._jobs[ref] = pod.job_uid
        old, new = None if before is None else pod_charge(before), pod_charge(pod)
        if before is not None and (old, before.uid) == (new, pod.uid):
            return change
        freed = change.freed
        if new is not None:
            freed |= self._ledger.charge(new[0], pod.uid, new[1])
        if old is not None and before is not None and (new is None or (old[0], before.uid) != (new[0], pod.uid)):
            freed |= self._ledger.release(old[0], before.uid)
        return PodChange(jobs=change.jobs, freed=freed)

    def _put_foreign(self, ref: ObjectRef, pod: ForeignPod | None) -> PodChange:
        self._drop_claim(ref)
        before = self._foreign.pop(ref, None)
        if pod is not None:
            self._foreign[ref] = pod
        if before == pod:
            return PodChange()
        if before is not None:
            self._nodes.add(before.node, before.requests, -1, busy=False)
        if pod is not None:
            self._nodes.add(pod.node, pod.requests, 1, busy=False)
        return PodChange(left=() if before is None else (before,))

    def _drop_claim(self, ref: ObjectRef) -> None:
        uid = self._claimed.pop(ref, None)
        if uid is None:
            return
        del self._claims[uid][ref]
        if not self._claims[uid]:
            del self._claims[uid]

    def _drop_worker(self, ref: ObjectRef) -> PodChange:
        uid = self._jobs.pop(ref, None)
        if uid is None:
            return PodChange()
        pod = self.by_job[uid].pop(ref)
        if not self.by_job[uid]:
            del self.by_job[uid]
        taken = pod_charge(pod)
        # Even a pod without usage counts: its job may have waited for its end.
        freed = taken is not None and self._ledger.release(taken[0], pod.uid)
        return PodChange(jobs=frozenset({uid}), freed=freed or uid not in self.by_job)


def is_worker_of(job: JobView, pod: PodView) -> bool:
    """Tell whether a pod that names a job as its owner is that job's."""
    return (pod.namespace, pod.job_name, pod.job_uid) == (job.namespace, job.name, job.uid)
