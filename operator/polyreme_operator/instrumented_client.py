"""A cluster whose calls are counted: by verb, kind and how each ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from polyreme_operator.port import (
    PAGE_OBJECTS,
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    GoneError,
    InvalidObjectError,
    ListPage,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    WatchEvent,
)
from polyreme_operator.publishing.metrics import Metrics

DONE = "200"
_CODES: tuple[tuple[type[PortError], str], ...] = (
    (AlreadyExistsError, "409"),
    (ConflictError, "409"),
    (NotFoundError, "404"),
    (GoneError, "410"),
    (InvalidObjectError, "422"),
    (TooManyRequestsError, "429"),
    (ServerError, "500"),
    (PortTimeoutError, "timeout"),
)
"""Codes as a port tells them apart: 422 stands for every refusal of the object, 500 for every failure of the server."""


class InstrumentedCluster:
    """Counts what goes through to another ``ClusterPort``, and changes nothing."""

    def __init__(self, port: ClusterPort, metrics: Metrics) -> None:
        self._port, self._metrics = port, metrics

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List one page of a kind."""
        with self._counts("list", kind):
            return await self._port.list(kind, namespace=namespace, limit=limit, continue_=continue_)

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Yield what happens after ``resource_version``; counted when it ends."""
        with self._counts("watch", kind):
            async for event in self._port.watch(kind, resource_version=resource_version, namespace=namespace):
                yield event

    async def get(self, ref: ObjectRef) -> Manifest:
        """Return the object as it is now."""
        with self._counts("get", ref.kind):
            return await self._port.get(ref)

    async def create(self, manifest: Manifest) -> Manifest:
        """Create the object."""
        with self._counts("create", str(manifest.get("kind"))):
            return await self._port.create(manifest)

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge into the object."""
        with self._counts("patch", ref.kind, status=subresource == STATUS_SUBRESOURCE):
            return await self._port.patch(ref, merge_patch, resource_version=resource_version, subresource=subresource)

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete the object that has this UID."""
        with self._counts("delete", ref.kind):
            await self._port.delete(ref, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s)

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Bind a pod to a node."""
        with self._counts("bind", ref.kind):
            await self._port.bind(ref, uid=uid, node=node)

    @contextmanager
    def _counts(self, verb: str, kind: str, *, status: bool = False) -> Iterator[None]:
        try:
            yield
        except PortError as error:
            self._metrics.requested(verb, kind, code_of(error), status=status)
            raise
        self._metrics.requested(verb, kind, DONE, status=status)


def code_of(error: PortError) -> str:
    """Return the code under which an error is counted."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "unknown")
