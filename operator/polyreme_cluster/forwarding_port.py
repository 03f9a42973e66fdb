"""A wrapper of a ``ClusterPort``: the base of every port that counts, refuses, delays or changes calls."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from polyreme_cluster.port import PAGE_OBJECTS, ClusterPort, ListPage, Manifest, ObjectRef, WatchEvent

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a port, but for a watch."""

    verb: str
    """Name of the method."""
    ref: ObjectRef
    """What it is about; of a list, the kind alone."""
    body: Manifest | None = None
    """The object that is created, or the patch."""
    uid: str | None = None
    resource_version: str | None = None
    subresource: str | None = None
    grace_period_s: int | None = None


class ForwardingPort:
    """A ``ClusterPort`` that passes every call on to another one.

    A subclass overrides ``_forward`` for what it does to every call, and single methods for what it changes in their
    arguments and answers.

    Args:
        port: The port that it wraps.
    """

    def __init__(self, port: ClusterPort) -> None:
        self._port = port

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List one page of a kind."""
        return await self._forward(
            Call(verb="list", ref=ObjectRef(kind=kind, name="")),
            lambda: self._port.list(kind, namespace=namespace, limit=limit, continue_=continue_),
        )

    def watch(self, kind: str, *, resource_version: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Yield what happens after ``resource_version``."""
        return self._port.watch(kind, resource_version=resource_version, namespace=namespace)

    async def get(self, ref: ObjectRef) -> Manifest:
        """Return the object as it is now."""
        return await self._forward(Call(verb="get", ref=ref), lambda: self._port.get(ref))

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create the object."""
        call = Call(verb="create", ref=_reference(manifest), body=manifest)
        return await self._forward(call, lambda: self._port.create(manifest, dry_run=dry_run))

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge into the object."""
        return await self._forward(
            Call(verb="patch", ref=ref, body=merge_patch, resource_version=resource_version, subresource=subresource),
            lambda: self._port.patch(ref, merge_patch, resource_version=resource_version, subresource=subresource),
        )

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete the object that has this UID."""
        await self._forward(
            Call(verb="delete", ref=ref, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s),
            lambda: self._port.delete(ref, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s),
        )

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Bind a pod to a node."""
        call = Call(verb="bind", ref=ref, uid=uid)
        await self._forward(call, lambda: self._port.bind(ref, uid=uid, node=node))

    async def evict(self, ref: ObjectRef, *, uid: str) -> None:
        """Ask for the eviction of a pod."""
        await self._forward(Call(verb="evict", ref=ref, uid=uid), lambda: self._port.evict(ref, uid=uid))

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:  # noqa: ARG002
        """Forward a call to the wrapped port; ``act`` makes it."""
        return await act()


def _reference(manifest: Manifest) -> ObjectRef:
    """Reference to an object, also where it lacks what every object must have: the wrapped port reports that."""
    metadata = manifest.get("metadata") or {}
    kind, namespace, name = manifest.get("kind"), metadata.get("namespace"), metadata.get("name")
    return ObjectRef(kind=str(kind), namespace=namespace or "", name=name or "")
