"""TrainingJobs: how they enter and leave the cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.admission import AdmissionIndex
from polyreme_operator.cache.job_notes import JobNotes
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.cache.plan_book import PlanBook
from polyreme_operator.cache.pods import PodIndex
from polyreme_operator.reconcile.quarantine import fault_message
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.parse import parse_unreadable_job
from polyreme_operator.types.views import JobView

_log = logging.getLogger(__name__)


class JobKind(Kind):
    """Jobs, which get the Leases and pods that came before them, and their plans.

    Args:
        jobs: The index of jobs.
        leases: Leases of jobs.
        pods: Pods of jobs.
        notes: What was noted about jobs.
        plans: Plans of jobs.
        admission: What the API server adds to a job's pods.
        parse: Parses a job; see ``parse_job_view``.
    """

    def __init__(
        self,
        jobs: JobIndex,
        leases: LeaseIndex,
        pods: PodIndex,
        *,
        notes: JobNotes,
        plans: PlanBook,
        admission: AdmissionIndex,
        parse: Callable[..., JobView],
    ) -> None:
        self._jobs, self._leases, self._pods, self._notes = jobs, leases, pods, notes
        self._plans, self._admission, self._parse = plans, admission, parse

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a job."""
        additions = functools.partial(self._admission.of, ref.namespace)
        return self._put(ref, self._parse(manifest, self._jobs.at(ref), seen_s=now_s, additions=additions))

    def put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes | None:
        """Keep a job that can't be read, so that its status says so."""
        try:
            return self._put(ref, parse_unreadable_job(manifest, self._jobs.at(ref), why))
        except Exception as error:  # noqa: BLE001 - whatever is stored must not stop the operator: the job is ignored
            _log.warning("can't parse anything of this job: %s, %s", ref, fault_message(error))
            return None

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a job."""
        uid = self._jobs.refs.pop(ref, None)
        return Changes() if uid is None else Changes(jobs={uid}, capacity=self._jobs.remove(uid).freed)

    def _put(self, ref: ObjectRef, job: JobView) -> Changes:
        changes, known = Changes(jobs={job.uid}), self._jobs.refs.get(ref)
        if known is not None and known != job.uid:
            changes |= self.remove(ref)
        if is_new := known != job.uid:
            changes |= self._leases.adopt(job) | self._pods.adopt(job).changes
        self._jobs.refs[ref] = job.uid
        self._notes.saw(self._jobs.views.get(job.uid), job)
        change = self._jobs.put(self._plans.attach(job))
        changes |= Changes(capacity=change.freed, asks=change.asks)
        pods = self._pods.by_job.get(job.uid, {}).values() if is_new else ()
        return changes | self._admission.learn(self._jobs.views[job.uid], pods)
