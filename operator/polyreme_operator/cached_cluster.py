"""The cluster, with every answer of the API server taken into the cache at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyreme_api.clock import Clock
from polyreme_cluster.port import STATUS_SUBRESOURCE, ClusterPort, ConflictError, Manifest, NotFoundError, ObjectRef
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.types.changes import Changes


class CachedCluster:
    """Reads and writes single objects, and reads one again after a conflict.

    Args:
        port: The cluster.
        clock: Time of answers.
        cache: Takes them.
        note: Called with the effects of each.
    """

    def __init__(self, port: ClusterPort, clock: Clock, cache: ClusterCache, note: Callable[[Changes], None]) -> None:
        self.port, self.clock, self.cache, self.note = port, clock, cache, note

    def take(self, manifest: Manifest) -> None:
        """Take a state of an object into the cache."""
        self.note(self.cache.put(manifest, now_s=self.clock.now_s()))

    async def refresh(self, ref: ObjectRef) -> Manifest | None:
        """Read one object into the cache; return it, or None if it does not exist."""
        try:
            found = await self.port.get(ref)
        except NotFoundError:
            self.note(self.cache.remove(ref, version=None))
            return None
        self.note(self.cache.put(found, now_s=self.clock.now_s(), reread=True))
        return found

    async def patch_status(self, ref: ObjectRef, status: Mapping[str, Any], *, resource_version: str) -> Manifest:
        """Patch the status of an object; the caller takes the answer into the cache.

        Raises:
            PortError: If it is not accepted.
        """
        patch = {"status": status}
        return await self.port.patch(ref, patch, resource_version=resource_version, subresource=STATUS_SUBRESOURCE)

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Bind a pod to a node.

        Raises:
            PortError: If it could not be bound though it exists.
        """
        try:
            await self.port.bind(ref, uid=uid, node=node)
            self.cache.pods.note_bound(ref, uid=uid, node=node)
        except NotFoundError:
            await self.refresh(ref)
        except ConflictError:
            # Another object or version exists: the next pass decides again.
            await self.refresh(ref)
            raise

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_s: int | None = None
    ) -> None:
        """Delete an object.

        Raises:
            PortError: If it could not be deleted though it exists.
        """
        try:
            await self.port.delete(ref, uid=uid, resource_version=resource_version, grace_period_s=grace_s)
        except NotFoundError:
            await self.refresh(ref)
        except ConflictError:
            # Another object or version exists: the next pass decides again.
            await self.refresh(ref)
            raise

    def note_refusal(self, uid: str, kind: str, message: str) -> None:
        """Note that the API server refuses to create an object of a job."""
        job = self.cache.job(uid)
        news = self.cache.notes.refusals.note(job, kind, message, now_s=self.clock.now_s())
        self.note(Changes(jobs={uid} if news else set()))
