"""``ClusterPort`` over a Kubernetes API server.

Nothing is kept by object: what the operator knows lies in its model. Reference: the Kubernetes API concepts
(https://kubernetes.io/docs/reference/using-api/api-concepts/): paginated lists, watches with bookmarks, merge patches
whose ``metadata.resourceVersion`` and ``metadata.uid`` are preconditions.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from aiohttp.connector import NEEDS_CLEANUP_CLOSED
from pydantic import TypeAdapter

from polyreme_cluster.adapters.kubernetes.answers import error_of, error_of_status
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.adapters.kubernetes.resources import (
    collection_path,
    object_path,
    tidy,
    without_managed_fields,
)
from polyreme_cluster.port import (
    PAGE_OBJECTS,
    InvalidObjectError,
    ListPage,
    Manifest,
    ObjectRef,
    PortTimeoutError,
    ServerError,
    WatchEvent,
    WatchEventType,
)

CONNECTIONS_MAX = 64
"""Connections for calls; the API server's own limits are in the hundreds for everybody."""
WATCHES_MAX = 64
"""Connections for watches: of their own, so that no watch ever takes the place of a write."""
REQUEST_S = 30.0
"""Time that a call has, its wait for a connection included; the API server itself gives up after 60 s."""
CONNECT_S = 10.0
WATCH_S = 290
"""How long the server is asked to hold a watch; the next one resumes."""
WATCH_SILENCE_S = 90.0
"""Bookmarks come every minute: a watch that is silent for longer counts as broken, and is restarted."""
LINE_BYTES_MAX = 4 << 20
"""Half of the longest line of a watch; etcd holds objects of 1.5 MiB."""
FIELD_MANAGER = "polyreme"
_WRITES = {"fieldManager": FIELD_MANAGER}
_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
_BODY = TypeAdapter(dict[str, Any])
"""Writes a pod's JSON in a quarter of the time that ``json`` takes; it reads none faster."""


class KubernetesCluster:
    """A Kubernetes cluster, as an asynchronous context manager.

    Args:
        connection: Which API server, and who we are.
        connections_max: Connections for calls.
        request_s: Time that a call has.
        selectors: Label selectors by kind: lists and watches show what they select, and nothing else. A cluster of
            15,000 nodes renews 1,500 Leases a second that are none of ours.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        connections_max: int = CONNECTIONS_MAX,
        request_s: float = REQUEST_S,
        selectors: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = connection
        self._selectors = {kind: {"labelSelector": selector} for kind, selector in (selectors or {}).items()}
        self._connections_max = connections_max
        self._call_timeout = aiohttp.ClientTimeout(total=request_s, sock_connect=min(CONNECT_S, request_s))
        self._watch_timeout = aiohttp.ClientTimeout(
            total=None, connect=request_s, sock_connect=CONNECT_S, sock_read=WATCH_SILENCE_S
        )
        self._calls: aiohttp.ClientSession | None = None
        self._watches: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Make the connection pools."""
        self._calls = self._session(self._connections_max)
        self._watches = self._session(WATCHES_MAX)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection; watches end."""
        for session in (self._calls, self._watches):
            if session is not None:
                await session.close()
        # Those that a cancelled call left half closed were aborted: their sockets close in the loop's next turn.
        await asyncio.sleep(0)

    def acting_as(self, connection: Connection) -> KubernetesCluster:
        """Return the same open cluster for another user, by the same connections."""
        twin = copy.copy(self)
        twin._connection = connection  # noqa: SLF001 - of this class
        return twin

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List one page of a kind."""
        query = {"limit": str(max(1, limit)), **self._selectors.get(kind, {})}
        if continue_ is not None:
            query["continue"] = continue_
        answer = await self._call(
            "GET", collection_path(kind, namespace), kind=kind, query=query, what=f"list of {kind}"
        )
        metadata = answer["metadata"]
        return ListPage(
            items=[tidy(item, kind) for item in answer.get("items") or ()],
            resource_version=str(metadata["resourceVersion"]),
            continue_=metadata.get("continue") or None,
        )

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Yield what happens after ``resource_version``; ends when the server or the connection does."""
        what = f"watch of {kind}"
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_S),
            **self._selectors.get(kind, {}),
        }
        path = collection_path(kind, namespace)
        try:
            async with await self._send(
                self._watches, "GET", path, query=query, what=what, timeout=self._watch_timeout
            ) as response:
                async for line in response.content:
                    yield _event(line, kind=kind, what=what)
        except (TimeoutError, aiohttp.ClientError):
            # A watch may end at any time: who asked resumes from the last version seen.
            return

    async def get(self, ref: ObjectRef) -> Manifest:
        """Return the object as it is now."""
        return tidy(await self._call("GET", object_path(ref), kind=ref.kind, what=f"get of {ref}"), ref.kind)

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create the object; a dry run refuses fields that the server would drop."""
        kind, metadata = manifest.get("kind"), manifest.get("metadata")
        if not isinstance(kind, str) or not isinstance(metadata, dict):
            raise InvalidObjectError("object has no kind or no metadata", field="kind")
        if metadata.get("resourceVersion"):
            # The server's own answer is a 500, which would be tried again.
            raise InvalidObjectError("a new object has no version yet", field="metadata.resourceVersion")
        path = collection_path(kind, metadata.get("namespace"))
        what = f"create of {kind} {metadata.get('namespace', '')}/{metadata.get('name', '')}"
        query = _WRITES | (_DRY_RUN if dry_run else {})
        return tidy(await self._call("POST", path, kind=kind, query=query, body=manifest, what=what), kind)

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge into the object, only if it still has ``resource_version``."""
        body = merge_patch
        if resource_version is not None:
            body = {
                **merge_patch,
                "metadata": {**(merge_patch.get("metadata") or {}), "resourceVersion": resource_version},
            }
        answer = await self._call(
            "PATCH",
            object_path(ref, subresource),
            kind=ref.kind,
            query=_WRITES,
            body=body,
            what=f"patch of {ref}",
        )
        return tidy(answer, ref.kind)

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete the object that has this UID."""
        preconditions = {"uid": uid} | ({} if resource_version is None else {"resourceVersion": resource_version})
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": preconditions,
            "propagationPolicy": "Background",
        }
        if grace_period_s is not None:
            # In the body: as a query parameter beside a body it would be ignored.
            body["gracePeriodSeconds"] = grace_period_s
        await self._call("DELETE", object_path(ref), body=body, what=f"delete of {ref}")

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Give the pod that has this UID to a node."""
        if ref.kind != "Pod":
            raise InvalidObjectError(f"bind refused: {ref} is no pod", field="kind")
        if not node:
            # The server's own answer is a 500, which would be tried again.
            raise InvalidObjectError(f"bind refused: {ref} to a node without a name", field="target.name")
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._call("POST", object_path(ref, "binding"), query=_WRITES, body=body, what=f"bind of {ref} to {node}")

    async def evict(self, ref: ObjectRef, *, uid: str) -> None:
        """Ask for the eviction of the pod that has this UID."""
        if ref.kind != "Pod":
            raise InvalidObjectError(f"eviction refused: {ref} is no pod", field="kind")
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": ref.name, "namespace": ref.namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        await self._call("POST", object_path(ref, "eviction"), body=body, what=f"eviction of {ref}")

    async def _call(
        self,
        method: str,
        path: str,
        *,
        what: str,
        kind: str = "",
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
    ) -> Manifest:
        """Make one call and return its answer; ``kind`` is that of the objects in it."""
        try:
            response = await self._send(
                self._calls, method, path, query=query or {}, body=body, what=what, timeout=self._call_timeout
            )
            async with response:
                answer = json.loads(without_managed_fields(await response.read(), kind))
        except ValueError as error:
            raise ServerError(f"{what} got an answer that is no JSON; whether it was done is unknown") from error
        except (TimeoutError, aiohttp.ClientError) as error:
            raise _no_answer(what, error) from error
        if not isinstance(answer, dict):
            raise ServerError(f"{what} got an answer that is no object; whether it was done is unknown")
        return answer

    async def _send(
        self,
        session: aiohttp.ClientSession | None,
        method: str,
        path: str,
        *,
        query: dict[str, str],
        what: str,
        timeout: aiohttp.ClientTimeout,
        body: Manifest | None = None,
    ) -> aiohttp.ClientResponse:
        """Send one request and return its answer, open, when it is no refusal."""
        if session is None:
            raise RuntimeError("the cluster is not open: use it in `async with`")
        connection = self._connection
        # Whole, as the server gets it: a URL that is put together of parts costs twice as much.
        url = f"{connection.url}{path}{'?' if query else ''}{urlencode(query)}"
        headers = {"Accept": "application/json", **await connection.headers()}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            response = await session.request(
                method,
                url,
                data=None if body is None else io.BytesIO(_BODY.dump_json(body)),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                server_hostname=connection.server_hostname,
                proxy=connection.proxy,
            )
            if response.status < 300:
                return response
            async with response:
                refusal = await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise _no_answer(what, error) from error
        if response.status == 401:
            connection.forget_token()
        raise error_of(what, response.status, refusal, response.headers)

    def _session(self, connections_max: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=connections_max, ssl=self._connection.tls or True, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED
        )
        # No cookies: a proxy's for one user must not go with the calls of another.
        return aiohttp.ClientSession(
            connector=connector, read_bufsize=LINE_BYTES_MAX, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        )


def _event(line: bytes, *, kind: str, what: str) -> WatchEvent:
    try:
        event = json.loads(without_managed_fields(line, kind))
        name, manifest = event["type"], event["object"]
    except (ValueError, TypeError, KeyError) as error:
        raise ServerError(f"{what} sent a line that is no event: {line[:100]!r}") from error
    if name == "ERROR":
        raise error_of_status(what, manifest)
    return WatchEvent(type=WatchEventType(name), object=tidy(manifest, kind))


def _no_answer(what: str, error: Exception) -> PortTimeoutError:
    said = str(error) or "time is up"
    return PortTimeoutError(f"{what} got no answer: {type(error).__name__}, {said}; whether it was done is unknown")
