"""Leases by job: a job's Lease has its derived name, is in its namespace and is controlled by it."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_operator.port import ObjectRef
from polyreme_operator.types.views import JobView, LeaseView


class LeaseIndex:
    """Leases of jobs; a Lease of an unknown job is kept until the job is known."""

    def __init__(self) -> None:
        self.by_job: dict[str, LeaseView] = {}
        """By UID of the job."""
        self._all: dict[ObjectRef, LeaseView] = {}

    def known(self, ref: ObjectRef) -> LeaseView | None:
        """Return a cached Lease."""
        return self._all.get(ref)

    def put(self, ref: ObjectRef, lease: LeaseView, job: JobView | None) -> set[str]:
        """Add a Lease; ``job`` is the one that it names, if known. Return the UIDs of jobs whose Lease it is."""
        changed = self.remove(ref) if self._all.get(ref, lease).job_uid != lease.job_uid else set()
        self._all[ref] = lease
        if job is not None and ref == lease_ref(job):
            self.by_job[job.uid] = lease
            changed.add(job.uid)
        return changed

    def remove(self, ref: ObjectRef) -> set[str]:
        """Remove a Lease; return the UIDs of jobs whose Lease it was."""
        lease = self._all.pop(ref, None)
        if lease is None or self.by_job.get(lease.job_uid) is not lease:
            return set()
        del self.by_job[lease.job_uid]
        return {lease.job_uid}

    def adopt(self, job: JobView) -> None:
        """Assign an earlier Lease to a job that has become known."""
        lease = self._all.get(lease_ref(job))
        if lease is not None and lease.job_uid == job.uid:
            self.by_job[job.uid] = lease

    def drop(self, uid: str) -> None:
        """Remove a job."""
        self.by_job.pop(uid, None)

    def excuse_silence(self, outage_s: float, *, now_s: float) -> None:
        """Extend every leader's deadline by an outage in which the operator could not read Leases."""
        for ref, lease in self._all.items():
            excused = dataclasses.replace(
                lease,
                seen_s=min(now_s, lease.seen_s + outage_s),
                advanced_seen_s=min(now_s, lease.advanced_seen_s + outage_s),
            )
            self._all[ref] = excused
            if self.by_job.get(lease.job_uid) is lease:
                self.by_job[lease.job_uid] = excused


def lease_ref(job: JobView) -> ObjectRef:
    """Return the reference of a job's Lease."""
    return ObjectRef(kind="Lease", namespace=job.namespace, name=labels.job_object_name(job.name, job.uid))
