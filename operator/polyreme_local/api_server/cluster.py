"""``ClusterPort`` over the store: what the operator, the kubelet and the tests in one process talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from polyreme_cluster.port import (
    PAGE_OBJECTS,
    GoneError,
    InvalidObjectError,
    ListPage,
    Manifest,
    ObjectRef,
    WatchEvent,
    WatchEventType,
)
from polyreme_local.api_server.store import BOOKMARK_EVERY, Store

WATCH_BATCH = 500


class EmbeddedCluster:
    """The embedded store as a cluster.

    Args:
        store: The objects.
        durable: Awaited after each write, until the journal holds it; None for a store in memory.
        collect_garbage: Whether owned objects are deleted right after their owner. The simulator's garbage
            collector is an actor of its own and does it late.
    """

    def __init__(
        self, store: Store, *, durable: Callable[[], Awaitable[None]] | None = None, collect_garbage: bool = True
    ) -> None:
        self.store = store
        self._durable = durable
        self._collect_garbage = collect_garbage

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List one page of a kind."""
        return self.store.list(kind, namespace=namespace, limit=limit, continue_=continue_)

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Yield what happens after ``resource_version``, with bookmarks while the kind is quiet."""
        history, seen = self.store.history(kind), _parse_version(resource_version)
        if seen > self.store.version:
            raise GoneError(f"resource version {seen} is of another store: newest is {self.store.version}")
        reported = seen
        while True:
            changes = history.after(seen, limit=WATCH_BATCH)
            for change in changes:
                seen = change.version
                if namespace is None or change.record.namespace == namespace:
                    reported = seen
                    yield change.event()
            if changes:
                continue
            seen = max(seen, self.store.version)
            if seen - reported >= BOOKMARK_EVERY:
                reported = seen
                yield _bookmark(kind, seen)
            else:
                await history.wait()

    async def get(self, ref: ObjectRef) -> Manifest:
        """Return the object."""
        return self.store.get(ref)

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create the object."""
        created = self.store.create(manifest, dry_run=dry_run)
        if dry_run:
            return created
        await self._written()
        return created

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge into the object."""
        result = self.store.patch(ref, merge_patch, resource_version=resource_version, subresource=subresource)
        await self._written()
        return result

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete the object."""
        self.store.delete(ref, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s)
        await self._written()

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Give a pod to a node."""
        self.store.bind(ref, uid=uid, node=node)
        await self._written()

    async def evict(self, ref: ObjectRef, *, uid: str) -> None:
        """Delete a pod, as its eviction does where it has no budget."""
        if ref.kind != "Pod":
            raise InvalidObjectError(f"eviction refused: {ref} is no pod", field="kind")
        self.store.delete(ref, uid=uid)
        await self._written()

    async def _written(self) -> None:
        if self._collect_garbage:
            self.store.collect_garbage()
        if self._durable is not None:
            await self._durable()


def _bookmark(kind: str, version: int) -> WatchEvent:
    return WatchEvent(
        type=WatchEventType.BOOKMARK, object={"kind": kind, "metadata": {"resourceVersion": str(version)}}
    )


def _parse_version(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise GoneError(f"no resource version of this store: {text!r}")
    return int(text)
