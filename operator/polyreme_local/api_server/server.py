"""The embedded cluster over loopback HTTP: the REST paths of Kubernetes, as far as launchers and commands need them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from polyreme_api.labels import GROUP, PLURAL_JOB, VERSION
from polyreme_cluster.port import (
    PAGE_OBJECTS,
    AlreadyExistsError,
    ConflictError,
    GoneError,
    InvalidObjectError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
    TooManyRequestsError,
)
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.rules import selects
from polyreme_local.api_server.tokens import Rights, TokenTable

LOOPBACK = "127.0.0.1"
_HOSTS = frozenset({LOOPBACK, "localhost"})
BODY_BYTES_MAX = 2_000_000
WATCH_S = 1_800
"""A watch that asks for no end of its own ends after this long."""
SHUTDOWN_S = 0.1
_JSON = "application/json"
_APIS = {
    "/api/v1": {
        "pods": "Pod",
        "nodes": "Node",
        "services": "Service",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "configmaps": "ConfigMap",
        "events": "Event",
        "podtemplates": "PodTemplate",
        "limitranges": "LimitRange",
    },
    "/apis/batch/v1": {"jobs": "Job"},
    f"/apis/{GROUP}/{VERSION}": {
        PLURAL_JOB: "TrainingJob",
        "trainingqueues": "TrainingQueue",
        "clustertopologies": "ClusterTopology",
        "nodefaultpolicies": "NodeFaultPolicy",
        "nodeincidents": "NodeIncident",
    },
    "/apis/coordination.k8s.io/v1": {"leases": "Lease"},
    "/apis/rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "/apis/scheduling.k8s.io/v1": {"priorityclasses": "PriorityClass"},
    "/apis/node.k8s.io/v1": {"runtimeclasses": "RuntimeClass"},
}
_AUTHENTICATION = "/apis/authentication.k8s.io/v1"
_REASONS: tuple[tuple[type[PortError], int, str], ...] = (
    (AlreadyExistsError, 409, "AlreadyExists"),
    (ConflictError, 409, "Conflict"),
    (NotFoundError, 404, "NotFound"),
    (GoneError, 410, "Expired"),
    (InvalidObjectError, 422, "Invalid"),
    (TooManyRequestsError, 429, "TooManyRequests"),
    (PortError, 500, "InternalError"),
)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiServer:
    """Serves one embedded cluster on a loopback port.

    Args:
        cluster: What to serve.
        tokens: Who may do what.
    """

    def __init__(self, cluster: EmbeddedCluster, *, tokens: TokenTable) -> None:
        self._cluster = cluster
        self._tokens = tokens
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, *, port: int = 0) -> str:
        """Listen and return the URL; the system chooses the port, unless one that was had before is asked for."""
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_refuse_other_hosts, _answer_errors])
        for prefix, kinds in _APIS.items():
            for scope in ("", "/namespaces/{namespace}"):
                for plural, kind in kinds.items():
                    self._route(app, f"{prefix}{scope}/{plural}", kind)
        app.router.add_post(f"{_AUTHENTICATION}/selfsubjectreviews", self._review)
        # Without cancellation a watch whose client is gone would stay until its kind changes.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, LOOPBACK, port)
        await site.start()
        self._runner = runner
        self.url = f"http://{LOOPBACK}:{runner.addresses[0][1]}"
        return self.url

    async def close(self) -> None:
        """Stop listening and break what is open."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _route(self, app: web.Application, path: str, kind: str) -> None:
        def bound(verb: str, act: Callable[[web.Request, ObjectRef], Awaitable[web.StreamResponse]]) -> _Handler:
            async def handle(request: web.Request) -> web.StreamResponse:
                rights = self._authenticated(request)
                ref = await _new_reference(request, kind) if verb == "create" else _reference(request, kind)
                real = "watch" if verb == "list" and request.query.get("watch") in {"1", "true"} else verb
                dry_run = request.query.getall("dryRun", [])
                _refuse_dry_run(dry_run if (verb, dry_run) != ("create", ["All"]) else None)
                if not rights.allow(real, ref):
                    raise web.HTTPForbidden(
                        text=_status(403, "Forbidden", f"{real} of {ref} is not allowed"), content_type=_JSON
                    )
                return await (self._watch if real == "watch" else act)(request, ref)

            return handle

        app.router.add_get(path, bound("list", self._list))
        app.router.add_post(path, bound("create", self._create))
        app.router.add_get(f"{path}/{{name}}", bound("get", self._get))
        app.router.add_patch(f"{path}/{{name}}", bound("patch", self._patch))
        app.router.add_patch(f"{path}/{{name}}/{{subresource}}", bound("patch", self._patch))
        app.router.add_delete(f"{path}/{{name}}", bound("delete", self._delete))
        if kind == "Pod":
            app.router.add_post(f"{path}/{{name}}/binding", bound("bind", self._bind))
            app.router.add_post(f"{path}/{{name}}/eviction", bound("evict", self._evict))

    def _authenticated(self, request: web.Request) -> Rights:
        """Return what the caller may do; before anything of the body is read."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        rights = self._tokens.rights(token) if scheme == "Bearer" else None
        if rights is None:
            raise web.HTTPUnauthorized(text=_status(401, "Unauthorized", "no valid bearer token"), content_type=_JSON)
        return rights

    async def _review(self, request: web.Request) -> web.StreamResponse:
        """Answer each caller whose token it has brought."""
        rights = self._authenticated(request)
        name = "admin" if rights.job is None else f"job:{rights.job.namespace}:{rights.job.name}"
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {}}
        return web.json_response(review | {"status": {"userInfo": {"username": f"polyreme:{name}"}}}, status=201)

    async def _list(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        limit = _number(request, "limit", PAGE_OBJECTS)
        page = self._cluster.store.list(
            ref.kind,
            namespace=ref.namespace or None,
            limit=limit,
            continue_=request.query.get("continue"),
            matches=_selector(request),
        )
        metadata = {"resourceVersion": page.resource_version, "continue": page.continue_ or ""}
        return web.json_response({"kind": f"{ref.kind}List", "metadata": metadata, "items": list(page.items)})

    async def _watch(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        version = request.query.get("resourceVersion") or str(self._cluster.store.version)
        matches = _selector(request)
        limit_s = _number(request, "timeoutSeconds", WATCH_S)
        response = web.StreamResponse(headers={"Content-Type": _JSON})
        await response.prepare(request)
        try:
            events = self._cluster.watch(ref.kind, resource_version=version, namespace=ref.namespace or None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    async for event in events:
                        if event.type == "BOOKMARK" or matches(event.object):
                            line = json.dumps({"type": event.type, "object": event.object})
                            await response.write(line.encode() + b"\n")
        except GoneError as error:
            body = {"type": "ERROR", "object": json.loads(_status(410, "Expired", error.message))}
            await response.write(json.dumps(body).encode() + b"\n")
        except (ConnectionError, asyncio.CancelledError):
            # The client went away, or the server closes: a watch may end at any time.
            return response
        return response

    async def _get(self, _request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        return web.json_response(await self._cluster.get(ref))

    async def _create(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        manifest = await _body(request)
        manifest["kind"] = ref.kind
        if ref.namespace:
            manifest["metadata"]["namespace"] = ref.namespace
        created = await self._cluster.create(manifest, dry_run="dryRun" in request.query)
        return web.json_response(created, status=201)

    async def _patch(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        patch = await _body(request)
        metadata = patch.get("metadata")
        version = metadata.pop("resourceVersion", None) if isinstance(metadata, dict) else None
        subresource = request.match_info.get("subresource")
        result = await self._cluster.patch(ref, patch, resource_version=version, subresource=subresource)
        return web.json_response(result)

    async def _delete(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        options = await _body(request) if request.can_read_body else {}
        _refuse_dry_run(options.get("dryRun"))
        preconditions = options.get("preconditions") or {}
        uid = preconditions.get("uid") or self._cluster.store.get(ref)["metadata"]["uid"]
        await self._cluster.delete(
            ref,
            uid=uid,
            resource_version=preconditions.get("resourceVersion"),
            grace_period_s=options.get("gracePeriodSeconds"),
        )
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _bind(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        binding = await _body(request)
        uid, node = (binding.get("metadata") or {}).get("uid"), (binding.get("target") or {}).get("name")
        if not isinstance(uid, str) or not isinstance(node, str):
            raise InvalidObjectError(f"binding of {ref} names no UID or no node", field="metadata.uid, target.name")
        await self._cluster.bind(ref, uid=uid, node=node)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)

    async def _evict(self, request: web.Request, ref: ObjectRef) -> web.StreamResponse:
        options = (await _body(request)).get("deleteOptions") or {}
        _refuse_dry_run(options.get("dryRun"))
        uid = (options.get("preconditions") or {}).get("uid")
        if not isinstance(uid, str):
            raise InvalidObjectError(f"eviction of {ref} names no UID", field="deleteOptions.preconditions.uid")
        await self._cluster.evict(ref, uid=uid)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)


@web.middleware
async def _refuse_other_hosts(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse what was meant for another name: a page in a browser that made its own name point here."""
    host = request.host.rpartition(":")[0] if ":" in request.host else request.host
    if host not in _HOSTS:
        text = _status(421, "MisdirectedRequest", f"host {host!r} is not served here")
        return web.Response(status=421, text=text, content_type=_JSON)
    return await handler(request)


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PortError as error:
        code, reason = next((code, reason) for kind, code, reason in _REASONS if isinstance(error, kind))
        return web.Response(status=code, text=_status(code, reason, str(error)), content_type=_JSON)


def _reference(request: web.Request, kind: str) -> ObjectRef:
    name = request.match_info.get("name") or _fields(request).get("metadata.name", "")
    return ObjectRef(kind=kind, namespace=request.match_info.get("namespace", ""), name=name)


async def _new_reference(request: web.Request, kind: str) -> ObjectRef:
    """Reference to the object that a request creates: the name is in its body."""
    metadata = (await _body(request)).get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidObjectError("object has no metadata", field="metadata")
    return ObjectRef(kind=kind, namespace=request.match_info.get("namespace", ""), name=str(metadata.get("name", "")))


def _fields(request: web.Request) -> dict[str, str]:
    return _pairs(request.query.get("fieldSelector", ""))


def _pairs(text: str) -> dict[str, str]:
    pairs = (part.replace("==", "=").partition("=") for part in text.split(",") if part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _selector(request: web.Request) -> Callable[[Manifest], bool]:
    labels, fields = _pairs(request.query.get("labelSelector", "")), _fields(request)
    return lambda manifest: selects(manifest, labels=labels, fields=fields)


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name) or str(default)
    if not text.isascii() or not text.isdigit():
        raise InvalidObjectError(f"query {name} is no whole number: {text!r}", field=name)
    return int(text)


async def _body(request: web.Request) -> Manifest:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise InvalidObjectError("request body is no JSON") from error
    if not isinstance(body, dict):
        raise InvalidObjectError("request body is no JSON object")
    return body


def _refuse_dry_run(asked: object) -> None:
    """Refuse a dry run that would be carried out in earnest."""
    if asked:
        raise InvalidObjectError(
            f"no dry run {asked} of that here; objects can be created with ['All']", field="dryRun"
        )


def _status(code: int, reason: str, message: str) -> str:
    return json.dumps(
        {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}
    )
