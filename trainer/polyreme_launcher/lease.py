"""The job's Lease as the leader keeps it: the newest record, signed, by compare-and-swap, never over a newer attempt's.

A record that no leader of the job has signed is not looked at, and labels and owner that another user removed are put
back: others who may write the Lease stop no leader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from polyreme_api.clock import Clock
from polyreme_api.environment import PodEnvironment
from polyreme_api.errors import NotFoundError
from polyreme_api.labels import job_object_name
from polyreme_api.ownership import is_marked, job_object_metadata
from polyreme_api.progress import ProgressRecord
from polyreme_api.signed_progress import ProgressSigner
from polyreme_api.times import rfc3339
from polyreme_launcher.api_client import ApiAwayError, ApiClient, ApiConflictError, ApiRefusedError

LEASE_S = 15
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
CONFLICTS_MAX = 16
"""Conflicts that one write retries at once before it waits."""


class LeaseKeeper:
    """Writes the newest record; one write at a time, and a newer record replaces one that is not yet written.

    Args:
        api: Client.
        pod: The leader's pod.
        key: The job's key.
        clock: Clock.
        on_written: Called when the Lease holds a record, with when the write began.
        on_lost: Called when a newer attempt or replacement wrote it.
        now_s: Time on the clock of leases.
    """

    def __init__(
        self,
        api: ApiClient,
        *,
        pod: PodEnvironment,
        key: bytes,
        clock: Clock,
        on_written: Callable[[ProgressRecord, float], None],
        on_lost: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._api = api
        self._pod = pod
        self._signer = ProgressSigner(key, pod.job_uid)
        self._clock = clock
        self._on_written = on_written
        self._on_lost = on_lost
        self._now_s = now_s
        self._name = job_object_name(pod.job, pod.job_uid)
        self._pending: ProgressRecord | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._version: str | None = None
        self._marked = True
        """Whether the Lease has its labels and its owner."""

    def put(self, record: ProgressRecord) -> None:
        """Queue a record for writing."""
        self._pending = record
        self._idle.clear()
        self._wake.set()

    async def flush(self, *, timeout_s: float) -> None:
        """Wait until all records are written, or for so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def run(self) -> None:
        """Write for as long as the leader lives."""
        delay_s = RETRY_FIRST_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            record, self._pending = self._pending, None
            if record is None:
                continue
            began_s = self._now_s()
            try:
                written = await self._write(record)
            except (ApiAwayError, ApiRefusedError, NotFoundError):
                # The API may be unavailable for long; training continues without it.
                self._put_back(record)
                self._version = None
                await self._clock.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                continue
            delay_s = RETRY_FIRST_S
            if not written:
                self._on_lost()
                return
            self._on_written(record, began_s)
            if self._pending is None:
                self._idle.set()

    def _put_back(self, record: ProgressRecord) -> None:
        """Queue a record again, unless a newer one has come."""
        if self._pending is None:
            self._pending = record
        self._wake.set()

    async def _write(self, record: ProgressRecord) -> bool:
        """Write one record; False if a record of another writer forbids it."""
        for _ in range(CONFLICTS_MAX):
            try:
                if self._version is None:
                    lease = await self._api.lease(self._name)
                    known = self._signer.read(lease)
                    if known is not None and known.outdates(record):
                        return False
                    self._seen(lease)
                patch = self._content(record)
                patch["metadata"]["resourceVersion"] = self._version
                if not self._marked:
                    patch["metadata"] |= job_object_metadata(self._pod.job, self._pod.job_uid)
                result = await self._api.patch_lease(self._name, patch)
            except NotFoundError:
                try:
                    result = await self._api.create_lease(self._new(record))
                except ApiConflictError:
                    self._version = None
                    continue
            except ApiConflictError:
                # Another writer was faster: read its record and decide again.
                self._version = None
                continue
            self._seen(result)
            return True
        raise ApiAwayError(f"Lease {self._name} changed {CONFLICTS_MAX} times under one write")

    def _seen(self, lease: dict[str, Any]) -> None:
        self._version = lease["metadata"]["resourceVersion"]
        self._marked = is_marked(lease["metadata"], self._pod.job_uid)

    def _content(self, record: ProgressRecord) -> dict[str, Any]:
        now_s = self._clock.now_s()
        return {
            "metadata": {"annotations": self._signer.annotations(record, at_s=now_s)},
            "spec": {"holderIdentity": self._pod.pod, "leaseDurationSeconds": LEASE_S, "renewTime": rfc3339(now_s)},
        }

    def _new(self, record: ProgressRecord) -> dict[str, Any]:
        content = self._content(record)
        metadata = {
            "name": self._name,
            "namespace": self._pod.namespace,
            **job_object_metadata(self._pod.job, self._pod.job_uid),
            **content["metadata"],
        }
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **content, "metadata": metadata}
