"""Serves ``/metrics`` to authorized accounts, and ``/healthz`` and ``/readyz`` to the kubelet.

Who reads the metrics must bring a bearer token. The API server says whose it is (TokenReview) and whether that account
may get the non-resource URL ``/metrics`` (SubjectAccessReview), as kube-rbac-proxy asks; its answers are kept briefly.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from polyreme_api.clock import Clock
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.metric_registry import MetricRegistry

METRICS_PATH = "/metrics"
ALLOWED_FRESH_S = 60.0
"""How long a permission is cached, during which a revoked token is still accepted."""
DENIED_FRESH_S = 10.0
"""How long a refusal is cached, during which a new permission has no effect."""
TOKENS_MAX = 1_024
"""Cached answers; the oldest one is evicted."""
TOKEN_CHARACTERS_MAX = 16_384
REVIEWS_MAX = 8
"""Tokens reviewed concurrently, so that unknown clients can't load the API server."""
REVIEW_S = 10.0
_BEARER = "bearer "

_log = logging.getLogger(__name__)


class ReviewError(Exception):
    """The API server did not answer; the request is refused, and nothing is cached."""


class Reviewer(Protocol):
    """Decides who may read the metrics."""

    async def verdict(self, token: str) -> int:
        """Return 200, 401 for an invalid token, or 403 for an account without permission.

        Raises:
            ReviewError: If it can't be decided now.
        """
        ...


class AccessReviewer:
    """Asks the API server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def verdict(self, token: str) -> int:
        """Return 200, 401 or 403."""
        timeout = aiohttp.ClientTimeout(total=REVIEW_S)
        connector = aiohttp.TCPConnector(ssl=self._connection.tls or True)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
                review = await self._review(session, "authentication.k8s.io", "TokenReview", {"token": token})
                if not review.get("authenticated"):
                    return 401
                user = review.get("user") or {}
                asked = {
                    "user": user.get("username", ""),
                    "uid": user.get("uid", ""),
                    "groups": user.get("groups") or [],
                    "extra": user.get("extra") or {},
                    "nonResourceAttributes": {"path": METRICS_PATH, "verb": "get"},
                }
                answer = await self._review(session, "authorization.k8s.io", "SubjectAccessReview", asked)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise ReviewError(f"review of a token got no answer: {type(error).__name__}") from error
        return 200 if answer.get("allowed") and not answer.get("denied") else 403

    async def _review(
        self, session: aiohttp.ClientSession, group: str, kind: str, spec: dict[str, Any]
    ) -> dict[str, Any]:
        connection = self._connection
        async with session.post(
            f"{connection.url}/apis/{group}/v1/{kind.lower()}s",
            json={"apiVersion": f"{group}/v1", "kind": kind, "spec": spec},
            headers={"Accept": "application/json", **await connection.headers()},
            allow_redirects=False,
            server_hostname=connection.server_hostname,
            proxy=connection.proxy,
        ) as response:
            body = await response.read()
            if response.status == 401:
                connection.forget_token()
            if response.status >= 300:
                raise ReviewError(f"{kind} refused: {response.status}; this account needs the right to create it")
        status = json.loads(body).get("status")
        return status if isinstance(status, dict) else {}


class CachedReviewer:
    """Caches the answers of another reviewer by the token's digest; tokens themselves are not stored."""

    def __init__(self, reviewer: Reviewer, clock: Clock) -> None:
        self._reviewer, self._clock = reviewer, clock
        self._known: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._asking = asyncio.Semaphore(REVIEWS_MAX)

    async def verdict(self, token: str) -> int:
        """Return 200, 401 or 403."""
        key = hashlib.sha256(token.encode()).digest()
        if (known := self._fresh(key)) is not None:
            return known
        async with self._asking:
            if (known := self._fresh(key)) is not None:
                return known
            code = await self._reviewer.verdict(token)
        fresh_s = ALLOWED_FRESH_S if code == 200 else DENIED_FRESH_S
        self._known[key] = (code, self._clock.steady_s() + fresh_s)
        self._known.move_to_end(key)
        while len(self._known) > TOKENS_MAX:
            self._known.popitem(last=False)
        return code

    def _fresh(self, key: bytes) -> int | None:
        known = self._known.get(key)
        return known[0] if known is not None and self._clock.steady_s() < known[1] else None


def application(
    metrics: MetricRegistry, *, reviewer: Reviewer | None, is_ready: Callable[[], bool], is_alive: Callable[[], bool]
) -> web.Application:
    """Return the server's application.

    Args:
        metrics: What is shown.
        reviewer: Decides who may read; None permits everyone, for an address that only this machine reaches.
        is_ready: Whether this replica can do its work.
        is_alive: Whether it should continue; the kubelet ends it when it is not.
    """

    async def show(request: web.Request) -> web.Response:
        code = 200 if reviewer is None else await _judge(reviewer, request.headers.get("Authorization", ""))
        if code != 200:
            headers = {"WWW-Authenticate": "Bearer"} if code == 401 else {}
            return web.Response(status=code, text=_WORDS[code] + "\n", headers=headers)
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        return _answer(is_alive())

    async def readyz(_: web.Request) -> web.Response:
        return _answer(is_ready())

    made = web.Application(client_max_size=1)
    made.router.add_get(METRICS_PATH, show)
    made.router.add_get("/healthz", healthz)
    made.router.add_get("/readyz", readyz)
    return made


async def serve(
    metrics: MetricRegistry,
    *,
    host: str = "",
    port: int,
    reviewer: Reviewer | None,
    is_ready: Callable[[], bool],
    is_alive: Callable[[], bool] = lambda: True,
    started: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until cancelled.

    Args:
        metrics: What is shown.
        host: Address to listen on; empty is every one.
        port: Port; 0 takes a free one.
        reviewer: Decides who may read the metrics; None permits everyone.
        is_ready: Answer of ``/readyz``.
        is_alive: Answer of ``/healthz``.
        started: Called with the port once requests are answered.
    """
    made = application(metrics, reviewer=reviewer, is_ready=is_ready, is_alive=is_alive)
    runner = web.AppRunner(made, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host or None, port)
        await site.start()
        started(runner.addresses[0][1])
        await asyncio.get_running_loop().create_future()
    finally:
        await runner.cleanup()


_WORDS = {
    401: "unauthorized: reading metrics needs a bearer token of this cluster",
    403: "forbidden: this account may not get the non-resource URL /metrics; bind it to a ClusterRole that allows it",
    503: "unavailable: the API server did not review this token",
}


async def _judge(reviewer: Reviewer, authorization: str) -> int:
    token = authorization[len(_BEARER) :].strip()
    if authorization[: len(_BEARER)].lower() != _BEARER or not token or len(token) > TOKEN_CHARACTERS_MAX:
        return 401
    try:
        return await reviewer.verdict(token)
    except ReviewError as error:
        _log.warning("metrics request rejected: %s", error)
        return 503


def _answer(holds: bool) -> web.Response:
    return web.Response(status=200 if holds else 503, text="ok\n" if holds else "not ready\n")
