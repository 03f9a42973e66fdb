"""The cluster as the operator sees it: asynchronous, lossy, compare-and-swap, as the Kubernetes API is.

Two adapters only: the Kubernetes API and the embedded store. One contract suite (``tests/contract``) holds both to
what this file says. Objects cross this port as Kubernetes-shaped JSON (``Manifest``); ``polyreme_operator.types``
parses them once, on the operator's side of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from sys import intern
from typing import Any, Protocol, TypeAlias

from polyreme_api.errors import NotFoundError as PolyremeNotFoundError
from polyreme_api.errors import PolyremeError, RefusedError, RetryableError

Manifest: TypeAlias = dict[str, Any]
"""One object as JSON: ``apiVersion``, ``kind``, ``metadata``, ``spec``, ``status``. A caller owns what it is handed."""

KINDS = (
    "TrainingJob",
    "TrainingQueue",
    "ClusterTopology",
    "NodeFaultPolicy",
    "NodeIncident",
    "Pod",
    "Node",
    "Service",
    "Lease",
    "Secret",
    "ConfigMap",
    "Event",
    "Job",
    "PodTemplate",
    "Role",
    "RoleBinding",
    "ServiceAccount",
    "PriorityClass",
    "LimitRange",
    "RuntimeClass",
    "Namespace",
)
CLUSTER_SCOPED = frozenset(
    {
        "Node",
        "TrainingQueue",
        "ClusterTopology",
        "NodeFaultPolicy",
        "NodeIncident",
        "PriorityClass",
        "RuntimeClass",
        "Namespace",
    }
)
STATUS_SUBRESOURCE = "status"
PAGE_OBJECTS = 500
"""Objects that one page of a list holds at most, unless the caller asks for fewer."""
PAGES_MAX = 2_000
"""Pages of one list: a million objects, several times what etcd holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ObjectRef:
    """Which object: kind, namespace, name. ``namespace`` is empty for kinds that belong to the cluster."""

    kind: str
    namespace: str = ""
    name: str

    @classmethod
    def of(cls, manifest: Manifest) -> ObjectRef:
        """Return the reference of an object; kinds and namespaces are interned, since caches hold many references."""
        metadata = manifest["metadata"]
        kind, namespace = intern(manifest["kind"]), intern(metadata.get("namespace") or "")
        return cls(kind=kind, namespace=namespace, name=metadata["name"])

    def __str__(self) -> str:
        """Write ``Pod default/name``."""
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


class WatchEventType(StrEnum):
    """What happened to the object that a watch event bears."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """Nothing happened; the object holds only ``metadata.resourceVersion``, from which to resume."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One event of a watch, in the order of resource versions within a kind."""

    type: WatchEventType
    object: Manifest
    """State after the event; for DELETED the last state, with the resource version of the delete."""

    @property
    def resource_version(self) -> str:
        """Version from which a watch resumes after this event."""
        return str(self.object["metadata"]["resourceVersion"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """One page of a list. All pages of one list show the state at one resource version."""

    items: Sequence[Manifest]
    resource_version: str
    """Version from which a watch misses nothing after this list."""
    continue_: str | None = None
    """Token of the next page; None on the last."""


class PortError(PolyremeError):
    """Base of the errors of a cluster."""


class AlreadyExistsError(PortError, RefusedError):
    """Create found an object of that name (409 AlreadyExists); nothing was changed."""


class ConflictError(PortError, RefusedError):
    """A resource version or UID precondition does not hold (409 Conflict); nothing was changed."""


class NotFoundError(PortError, PolyremeNotFoundError):
    """No such object (404)."""


class GoneError(PortError, RetryableError):
    """The resource version or continue token is older than the kept history (410): list again."""


class InvalidObjectError(PortError, RefusedError):
    """The object breaks the schema (422), or the caller may not write it (403); the same call fails again."""


class ForbiddenError(InvalidObjectError):
    """The caller may not do this (403): by RBAC, or by an admission plugin."""


class TooManyRequestsError(PortError, RetryableError):
    """The server sheds load (429); nothing was changed. ``delay_s`` is its Retry-After."""


class ServerError(PortError, RetryableError):
    """The server failed (5xx). Whether the write was committed is unknown."""


class UnauthorizedError(ServerError):
    """The server does not accept the credentials (401); those of a source that renews them may do next time."""


class PortTimeoutError(PortError, RetryableError):
    """No answer in time, or the connection broke. Whether the write was committed is unknown."""


class NotLeadingError(PortError, RetryableError):
    """This process does not lead; nothing was sent."""


class ClusterPort(Protocol):
    """A cluster's API. Every method may raise TooManyRequestsError, ServerError and PortTimeoutError."""

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List one page of a kind, in the order of (namespace, name); ``namespace`` None is all of them.

        Raises:
            GoneError: If ``continue_`` has expired.
        """
        ...

    def watch(self, kind: str, *, resource_version: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Yield events after ``resource_version``.

        A watch may end at any time without an error: watch again from the last version seen, or list.

        Raises:
            GoneError: If the history from ``resource_version`` on is no longer kept.
        """
        ...

    async def get(self, ref: ObjectRef) -> Manifest:
        """Return the object as it is now.

        Raises:
            NotFoundError: If there is none.
        """
        ...

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create the object and return it with ``uid``, ``resourceVersion``, ``generation``, ``creationTimestamp`` set.

        With ``dry_run`` everything is checked and nothing is stored: the answer has no ``resourceVersion``.

        Raises:
            AlreadyExistsError: If the name is taken, also by an object that is being deleted.
            InvalidObjectError: If the schema refuses it.
        """
        ...

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge (RFC 7386) into the object, only if it still has ``resource_version``; return the result.

        With ``subresource="status"`` send ``status`` alone: ``spec`` is ignored then, and so are labels and annotations
        of our own kinds, but not of the API server's. Without, ``status`` is ignored for kinds that have the
        subresource. A change of ``spec`` bumps ``metadata.generation``. A patch that changes nothing keeps the version.
        Another UID than the object's is refused as invalid: the version is the precondition.

        Raises:
            NotFoundError: If there is none.
            ConflictError: If the version is another.
            InvalidObjectError: If the schema refuses the result.
        """
        ...

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete the object that has this UID.

        A pod that a node has gets a ``deletionTimestamp``, and goes when its kubelet has ended it; one that has ended
        before, or has no node, goes at once, as other kinds do. ``grace_period_s=0`` removes a pod at once, whatever
        still runs; None takes the pod's own grace period. A pod that is being deleted goes by 0 alone, also when it
        ends meanwhile; a longer grace period changes nothing. What the object owns is deleted after it.

        Raises:
            NotFoundError: If there is none.
            ConflictError: If UID or version is another.
        """
        ...

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Give the pod that has this UID to a node, for good. Whether there is such a node is not looked at.

        Raises:
            NotFoundError: If there is no such pod.
            ConflictError: If its UID is another, it has a node already (also if it is this one), it is being deleted,
                or it waits at a scheduling gate.
            InvalidObjectError: If the object is no pod, or the node has no name.
        """
        ...

    async def evict(self, ref: ObjectRef, *, uid: str) -> None:
        """Ask for the eviction of the pod that has this UID, which budgets of its owner may refuse.

        Raises:
            NotFoundError: If there is no such pod.
            ConflictError: If its UID is another.
            TooManyRequestsError: If a PodDisruptionBudget refuses it now.
            InvalidObjectError: If the object is no pod.
        """
        ...


async def pages_of(cluster: ClusterPort, kind: str, *, namespace: str | None = None) -> AsyncIterator[ListPage]:
    """Yield the pages of a list, the last one too.

    Raises:
        ServerError: If it does not end.
    """
    token: str | None = None
    for _ in range(PAGES_MAX):
        page = await cluster.list(kind, namespace=namespace, continue_=token)
        yield page
        token = page.continue_
        if token is None:
            return
    raise ServerError(f"list of {kind} does not end: {PAGES_MAX} pages of {PAGE_OBJECTS} objects were read")
