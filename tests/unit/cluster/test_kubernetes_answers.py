"""What an API server may answer, sent over a real socket, and what the port makes of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidObjectError,
    NotFoundError,
    ObjectRef,
    PortError,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    UnauthorizedError,
    WatchEvent,
)
from tests.contract.manifests import lease

LEASE = ObjectRef(kind="Lease", namespace="default", name="lease")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Story = Callable[[KubernetesCluster], Coroutine[Any, Any, None]]


def against(handler: Handler, story: Story, *, request_s: float = 30.0) -> None:
    """Tell a story against a server that answers everything by one handler."""

    async def told() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection = Connection(
            url=f"http://127.0.0.1:{runner.addresses[0][1]}", tls=None, authorization=lambda: "Bearer t"
        )
        try:
            async with KubernetesCluster(connection, request_s=request_s) as cluster:
                await story(cluster)
        finally:
            await runner.cleanup()

    asyncio.run(told())


def status(code: int, reason: str, **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": "because", "details": details}


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        (400, "BadRequest", InvalidObjectError),
        (401, "Unauthorized", UnauthorizedError),
        (403, "Forbidden", ForbiddenError),
        (404, "NotFound", NotFoundError),
        (409, "AlreadyExists", AlreadyExistsError),
        (409, "Conflict", ConflictError),
        (410, "Expired", GoneError),
        (422, "Invalid", InvalidObjectError),
        (429, "TooManyRequests", TooManyRequestsError),
        (500, "InternalError", ServerError),
        (503, "ServiceUnavailable", ServerError),
        (504, "Timeout", PortTimeoutError),
    ],
)
def test_each_refusal_has_its_error(code: int, reason: str, error: type[PortError]) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(status(code, reason), status=code)

    async def story(cluster: KubernetesCluster) -> None:
        for call in (cluster.get(LEASE), cluster.create(lease()), cluster.patch(LEASE, {}), cluster.list("Lease")):
            with pytest.raises(error, match="because") as caught:
                await call
            assert type(caught.value) is error

    against(handler, story)


@pytest.mark.parametrize(
    ("headers", "details", "delay_s"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"retryAfterSeconds": 3}, 3.0),
        ({}, {}, 1.0),
        ({"Retry-After": "x"}, {}, 1.0),
    ],
)
def test_a_server_that_sheds_load_says_how_long(
    headers: dict[str, str], details: dict[str, Any], delay_s: float
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(status(429, "TooManyRequests", **details), status=429, headers=headers)

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(TooManyRequestsError) as caught:
            await cluster.get(LEASE)
        assert caught.value.delay_s == delay_s

    against(handler, story)


def test_a_refused_object_names_the_field_to_change() -> None:
    async def handler(request: web.Request) -> web.Response:
        body = status(422, "Invalid", causes=[{"reason": "FieldValueInvalid", "field": "spec.workers.replicas"}])
        return web.json_response(body, status=422)

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(InvalidObjectError) as caught:
            await cluster.create(lease())
        assert caught.value.field == "spec.workers.replicas"

    against(handler, story)


def test_a_version_of_another_history_is_gone() -> None:
    async def handler(request: web.Request) -> web.Response:
        body = status(504, "Timeout", causes=[{"reason": "ResourceVersionTooLarge"}])
        return web.json_response(body, status=504)

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(GoneError):
            await anext(cluster.watch("Lease", resource_version="99999999"))

    against(handler, story)


@pytest.mark.parametrize("body", [b"<html>a proxy</html>", b"[]", b""])
def test_an_answer_that_is_no_object_leaves_the_outcome_open(body: bytes) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(ServerError, match="unknown"):
            await cluster.create(lease())

    against(handler, story)


def test_a_server_that_says_nothing_leaves_the_outcome_open() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(PortTimeoutError, match="unknown"):
            await cluster.create(lease())

    against(handler, story, request_s=0.05)


def test_a_connection_that_breaks_leaves_the_outcome_open() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(PortTimeoutError, match="unknown"):
            await cluster.patch(LEASE, {})

    against(handler, story)


def test_a_watch_ends_without_an_error_when_its_connection_breaks() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event("ADDED", lease(resourceVersion="5")) + b'{"type": "ADD')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def story(cluster: KubernetesCluster) -> None:
        seen = [event async for event in cluster.watch("Lease", resource_version="4")]
        assert [event.resource_version for event in seen] == ["5"]

    against(handler, story)


def test_a_watch_whose_history_goes_says_so_behind_what_it_showed() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        bookmark = event("BOOKMARK", {"kind": "Lease", "metadata": {"resourceVersion": "9"}})
        await response.write(bookmark + event("ERROR", status(410, "Expired")))
        return response

    async def story(cluster: KubernetesCluster) -> None:
        events: AsyncIterator[WatchEvent] = cluster.watch("Lease", resource_version="4")
        assert (await anext(events)).resource_version == "9"
        with pytest.raises(GoneError):
            await anext(events)

    against(handler, story)


def test_what_is_sent_is_what_the_api_asks_for() -> None:
    seen: list[tuple[str, str, str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        text = await request.text()
        content = request.headers.get("Content-Type", "")
        seen.append((request.method, request.path_qs, content, json.loads(text) if text else None))
        assert request.headers["Authorization"] == "Bearer t"
        return web.json_response(lease())

    async def story(cluster: KubernetesCluster) -> None:
        await cluster.patch(LEASE, {"spec": {}, "metadata": {"labels": {"a": "b"}}}, resource_version="7")
        await cluster.patch(ObjectRef(kind="Node", name="n"), {"status": {}}, subresource="status")
        await cluster.delete(LEASE, uid="u", resource_version="8", grace_period_s=0)

    against(handler, story)
    merge = "application/merge-patch+json"
    path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/lease"
    manager = "?fieldManager=polyreme"
    options = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "u", "resourceVersion": "8"},
        "propagationPolicy": "Background",
        "gracePeriodSeconds": 0,
    }
    assert seen == [
        ("PATCH", path + manager, merge, {"spec": {}, "metadata": {"labels": {"a": "b"}, "resourceVersion": "7"}}),
        ("PATCH", f"/api/v1/nodes/n/status{manager}", merge, {"status": {}}),
        ("DELETE", path, "application/json", options),
    ]


def test_items_of_a_list_have_their_kind_and_no_managed_fields() -> None:
    bare = {"metadata": {"name": "a", "managedFields": [{"manager": "x"}]}}

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "7", "continue": ""}, "items": [bare]})

    async def story(cluster: KubernetesCluster) -> None:
        page = await cluster.list("Lease")
        assert page.items == [{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "a"}}]
        assert (page.resource_version, page.continue_) == ("7", None)

    against(handler, story)


def test_a_name_that_looks_like_a_path_stays_a_name() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.json_response(lease())

    async def story(cluster: KubernetesCluster) -> None:
        await cluster.get(ObjectRef(kind="Lease", namespace="default", name="../../secrets/a?b=c#d"))

    against(handler, story)
    assert seen == ["/apis/coordination.k8s.io/v1/namespaces/default/leases/..%2F..%2Fsecrets%2Fa%3Fb=c%23d"]


@pytest.mark.parametrize(
    "ref",
    [
        ObjectRef(kind="Lease", namespace="default", name=""),
        ObjectRef(kind="Lease", namespace="default", name=".."),
        ObjectRef(kind="Lease", name="no-namespace"),
        ObjectRef(kind="Node", namespace="default", name="in-none"),
        ObjectRef(kind="Secrets", namespace="default", name="x"),
    ],
    ids=str,
)
def test_a_reference_that_could_become_another_path_is_not_sent(ref: ObjectRef) -> None:
    async def handler(request: web.Request) -> web.Response:
        raise AssertionError(request.path_qs)

    async def story(cluster: KubernetesCluster) -> None:
        with pytest.raises(InvalidObjectError):
            await cluster.get(ref)

    against(handler, story)


def test_a_refused_token_is_reloaded() -> None:
    tokens = iter(["old", "new"])
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        refused = seen[-1] == "old"
        return web.json_response(status(401, "Unauthorized") if refused else lease(), status=401 if refused else 200)

    async def story(cluster: KubernetesCluster) -> None:
        cluster._connection._authorization = lambda: next(tokens)
        with pytest.raises(ServerError):
            await cluster.get(LEASE)
        await cluster.get(LEASE)
        await cluster.get(LEASE)

    against(handler, story)
    assert seen == ["old", "new", "new"]


def event(name: str, manifest: dict[str, Any]) -> bytes:
    return json.dumps({"type": name, "object": manifest}).encode() + b"\n"
