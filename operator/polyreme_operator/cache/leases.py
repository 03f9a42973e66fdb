"""Leases by job: a job's Lease has its derived name, is in its namespace and is controlled by it.

What is written on a Lease is believed of none but the job's own leader. Only records that it signed, each newer than
those before, are taken into the view; any other changes nothing, and is no heartbeat. Nor does a job lose its Lease if
another account removes its owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polyreme_api import labels
from polyreme_api.ownership import owner_of_job_object
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.lease_record import (
    Order,
    RecordFault,
    RefusedRecord,
    SaidRecord,
    can_sign,
    oldest_that_counts,
)
from polyreme_operator.types.views import JobView, LeaseView


@dataclasses.dataclass(slots=True)
class _Heard:
    """The newest record of a job that counted."""

    order: Order
    signature: str = ""
    view: LeaseView | None = None
    """The Lease as it was then; None while only the job's status says that there was a record."""


class LeaseIndex(Kind):
    """Leases of jobs; a Lease of an unknown job is kept until the job is known.

    Args:
        keys: Derive the keys of jobs.
        job_at: Returns the job of a reference; None if it is not known.
    """

    def __init__(self, keys: JobKeys, job_at: Callable[[ObjectRef], JobView | None]) -> None:
        self.by_job: dict[str, LeaseView] = {}
        """By UID of the job."""
        self._keys, self._job_at = keys, job_at
        self._all: dict[ObjectRef, LeaseView] = {}
        self._jobless: dict[ObjectRef, tuple[Manifest, float]] = {}
        """Leases whose job is not known, and when they came."""
        self._known: set[str] = set()
        """Jobs that have had a Lease."""
        self._heard: dict[str, _Heard] = {}
        self._own_keys: dict[str, tuple[bytes, ...]] = {}
        """Derived keys of jobs."""
        self._reported: set[tuple[str, RecordFault]] = set()
        """Jobs and faults that an event was emitted for."""

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes | None:
        """Add a Lease; None if it belongs to no job."""
        job, owner = self._named(ref), owner_of_job_object(manifest["metadata"])
        if job is None or not self.is_of(job, manifest["metadata"]):
            changed = self.remove(ref)
            if owner is None:
                return None
            self._jobless[ref] = manifest, now_s
            return changed
        self._jobless.pop(ref, None)
        return self._take(ref, manifest, job, now_s)

    def is_others(self, ref: ObjectRef, manifest: Manifest) -> bool:
        """Tell whether an unknown Lease belongs to no job."""
        job, metadata = self._named(ref), manifest["metadata"]
        return owner_of_job_object(metadata) is None and (job is None or not self.is_of(job, metadata))

    def is_of(self, job: JobView, metadata: Mapping[str, Any]) -> bool:
        """Tell whether a Lease of a job's name is its own.

        One that it has had is known by its name: a client that may patch it may also remove its owner, and what it says
        is verified anyway. A job that has had pods had its Lease before them.
        """
        owner, attempt = owner_of_job_object(metadata), job.attempt
        if owner is not None and owner.uid == job.uid:
            return True
        had_pods = attempt is not None and (attempt.number > 1 or job.status.replicas > 0)
        return can_sign(job) and (had_pods or job.uid in self._known)

    def _named(self, ref: ObjectRef) -> JobView | None:
        """Return the job whose Lease has this name."""
        name = ref.name.rpartition("-")[0]
        job = self._job_at(ObjectRef(kind=labels.KIND_JOB, namespace=ref.namespace, name=name))
        return None if job is None or ref != lease_ref(job) else job

    def _take(self, ref: ObjectRef, manifest: Manifest, job: JobView, seen_s: float) -> Changes:
        metadata, known, heard = manifest["metadata"], self.by_job.get(job.uid), self._heard.get(job.uid)
        # One that was out of sight, since another account had removed its labels, is as it was.
        before = known or (None if heard is None else heard.view)
        if before is None or before.uid != metadata["uid"]:
            before = LeaseView(
                namespace=ref.namespace,
                name=ref.name,
                uid=metadata["uid"],
                resource_version="",
                job_uid=job.uid,
                seen_s=seen_s,
                advanced_seen_s=seen_s,
            )
        after, fault = self._believe(job, before, SaidRecord.on(metadata), seen_s)
        after = dataclasses.replace(after, resource_version=metadata["resourceVersion"])
        self._all[ref] = self.by_job[job.uid] = after
        self._known.add(job.uid)
        if fault is None:
            return Changes(jobs={job.uid})
        first = (job.uid, fault) not in self._reported
        self._reported.add((job.uid, fault))
        refused = RefusedRecord(ref=job.ref, uid=job.uid, fault=fault, first=first)
        return Changes(jobs={job.uid} if known is None else set(), refused=(refused,))

    def _believe(
        self, job: JobView, lease: LeaseView, said: SaidRecord, seen_s: float
    ) -> tuple[LeaseView, RecordFault | None]:
        """Return the Lease with what it says now, as far as that counts, and why a record does not."""
        if not can_sign(job):
            return _with_record(lease, said.read(), seen_s), None
        if not said.text and lease.record is None:
            return lease, None
        fault = said.check(keys=self._keys_of(job.uid), job_uid=job.uid)
        if fault is not None:
            # Without its key the attempt's own records look like forged ones; they are no news to anybody.
            return lease, None if fault is RecordFault.FORGED and job.key_lost else fault
        heard = self._heard.get(job.uid)
        if heard is not None and heard.view is not None and said.signature == heard.signature:
            return lease if lease.record is not None else _restored(lease, heard.view), None
        record = said.read()
        if record is None:
            # A newer launcher has signed it.
            return lease, None
        if heard is None:
            heard = self._heard[job.uid] = _Heard(oldest_that_counts(job))
            if record.order < heard.order:
                # It was there before this operator: the leader of the attempt on record has not reported yet.
                return lease, None
        if record.order < heard.order or (record.order == heard.order and heard.view is not None):
            return lease, RecordFault.REPLAYED
        lease = _with_record(lease, record, seen_s)
        heard.order, heard.signature, heard.view = record.order, said.signature, lease
        return lease, None

    def _keys_of(self, uid: str) -> tuple[bytes, ...]:
        found = self._own_keys.get(uid)
        if found is None:
            found = self._own_keys[uid] = self._keys.of_job(uid)
        return found

    def ref_of(self, uid: str) -> ObjectRef | None:
        """Return the reference of a job's Lease; None if it has none."""
        lease = self.by_job.get(uid)
        return None if lease is None else lease.ref

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a Lease."""
        self._jobless.pop(ref, None)
        lease = self._all.pop(ref, None)
        if lease is None or self.by_job.get(lease.job_uid) is not lease:
            return Changes()
        del self.by_job[lease.job_uid]
        return Changes(jobs={lease.job_uid})

    def adopt(self, job: JobView) -> Changes:
        """Assign an earlier Lease to a job that has become known."""
        ref = lease_ref(job)
        lease, waiting = self._all.get(ref), self._jobless.get(ref)
        if lease is not None and lease.job_uid == job.uid:
            self.by_job[job.uid] = lease
        if waiting is None or not self.is_of(job, waiting[0]["metadata"]):
            return Changes()
        del self._jobless[ref]
        return self._take(ref, waiting[0], job, waiting[1])

    def drop(self, uid: str) -> None:
        """Remove a job."""
        self.by_job.pop(uid, None)
        self._heard.pop(uid, None)
        self._own_keys.pop(uid, None)
        self._known.discard(uid)
        self._reported.difference_update((uid, fault) for fault in RecordFault)

    def void(self) -> None:
        """Forget which records counted, since the cluster was restored from a backup: attempts may rise again."""
        self._heard.clear()

    def excuse_silence(self, outage_s: float, *, now_s: float) -> None:
        """Extend every leader's deadline by an outage in which the operator could not read Leases."""
        for ref, lease in self._all.items():
            excused = _excused(lease, outage_s, now_s)
            self._all[ref] = excused
            if self.by_job.get(lease.job_uid) is lease:
                self.by_job[lease.job_uid] = excused
        for heard in self._heard.values():
            heard.view = None if heard.view is None else _excused(heard.view, outage_s, now_s)
        for ref, (manifest, seen_s) in self._jobless.items():
            self._jobless[ref] = manifest, min(now_s, seen_s + outage_s)


def lease_ref(job: JobView) -> ObjectRef:
    """Return the reference of a job's Lease."""
    return ObjectRef(kind="Lease", namespace=job.namespace, name=labels.job_object_name(job.name, job.uid))


def _with_record(lease: LeaseView, record: ProgressRecord | None, seen_s: float) -> LeaseView:
    """Return a Lease that was renewed with a record."""
    if _place(lease.record) == _place(record):
        return dataclasses.replace(lease, record=record, seen_s=seen_s)
    said_s = 0.0 if record is None else record.updated_at_s
    return dataclasses.replace(lease, record=record, seen_s=seen_s, advanced_seen_s=seen_s, advanced_said_s=said_s)


def _restored(lease: LeaseView, heard: LeaseView) -> LeaseView:
    """Return a Lease that was away with the record that it still holds, which is no new heartbeat."""
    return dataclasses.replace(
        lease,
        record=heard.record,
        seen_s=heard.seen_s,
        advanced_seen_s=heard.advanced_seen_s,
        advanced_said_s=heard.advanced_said_s,
    )


def _excused(lease: LeaseView, outage_s: float, now_s: float) -> LeaseView:
    return dataclasses.replace(
        lease,
        seen_s=min(now_s, lease.seen_s + outage_s),
        advanced_seen_s=min(now_s, lease.advanced_seen_s + outage_s),
    )


def _place(record: ProgressRecord | None) -> tuple[object, ...] | None:
    """Return the part of a record that increases while an attempt makes progress."""
    return None if record is None else (record.attempt, record.replacement, record.phase, record.step)
