"""A small client of the Kubernetes API for one job: the same calls against the embedded cluster and a real API server.

In a cluster the token is the pod's service account's, read again for every request because the kubelet rotates it.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.connector import NEEDS_CLEANUP_CLOSED

from polyreme_api.errors import NotFoundError, RefusedError, RetryableError
from polyreme_api.labels import GROUP, PLURAL_JOB, VERSION

REQUEST_S = 10.0
CONNECT_S = 3.0
WATCH_S = 300
"""A watch is asked to end after this long; the next one resumes."""
LINE_BYTES_MAX = 4 << 20
CLUSTER_CA = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")


class ApiRefusedError(RefusedError):
    """The server refuses the call (4xx)."""


class ApiConflictError(RefusedError):
    """The object exists, or has another resource version (409)."""


class ApiGoneError(RetryableError):
    """The watch's history has expired (410): list again."""


class ApiAwayError(RetryableError):
    """The server does not answer, or failed; whether a write was committed is unknown."""


class ApiClient:
    """Reads one job and keeps one Lease.

    Args:
        url: Root of the API.
        token_file: File with the bearer token.
        namespace: Namespace of the job.
    """

    def __init__(self, *, url: str, token_file: Path, namespace: str) -> None:
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._namespace = namespace
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the connection pool."""
        # Only in a cluster: a loopback URL is plain HTTP.
        tls = ssl.create_default_context(cafile=str(CLUSTER_CA)) if CLUSTER_CA.exists() else True
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED),
            timeout=timeout,
            read_bufsize=LINE_BYTES_MAX,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def job(self, name: str) -> dict[str, Any]:
        """Read the job."""
        return await self._call("GET", f"{self._jobs}/{name}")

    async def watch_job(self, name: str, *, resource_version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the job's states after ``resource_version`` until the server ends the watch.

        Raises:
            ApiGoneError: If the history is gone.
            NotFoundError: If the job was deleted.
            ApiAwayError: If the connection broke.
        """
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_S),
            "allowWatchBookmarks": "true",
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=WATCH_S + REQUEST_S)
        assert self._session is not None
        try:
            async with self._session.get(
                f"{self._url}{self._jobs}", params=query, headers=self._headers(), timeout=timeout
            ) as response:
                await _check(response, "GET", self._jobs)
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiGoneError(f"watch ended: {event['object'].get('reason', 'unknown')}")
                    if event["type"] == "DELETED":
                        raise NotFoundError(f"job {self._namespace}/{name} was deleted")
                    yield event["object"]
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise ApiAwayError(f"watch broke: {type(error).__name__}") from error

    async def lease(self, name: str) -> dict[str, Any]:
        """Read a Lease."""
        return await self._call("GET", f"{self._leases}/{name}")

    async def create_lease(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create a Lease."""
        return await self._call("POST", self._leases, manifest)

    async def patch_lease(self, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        """Merge into a Lease; ``metadata.resourceVersion`` in the patch is its precondition."""
        return await self._call("PATCH", f"{self._leases}/{name}", patch)

    @property
    def _jobs(self) -> str:
        return f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{PLURAL_JOB}"

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token_file.read_text().strip()}", "Accept": "application/json"}

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._session is not None
        data = None if body is None else json.dumps(body).encode()
        try:
            headers = self._headers()
            if body is not None:
                headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
            async with self._session.request(method, f"{self._url}{path}", data=data, headers=headers) as response:
                await _check(response, method, path)
                answer: dict[str, Any] = await response.json()
                return answer
        except (OSError, aiohttp.ClientError, ValueError) as error:
            raise ApiAwayError(f"{method} {path} got no answer: {type(error).__name__}") from error


async def _check(response: aiohttp.ClientResponse, method: str, path: str) -> None:
    if response.status < 400:
        return
    text = (await response.text())[:500]
    what = f"{method} {path} answered {response.status}: {text}"
    match response.status:
        case 404:
            raise NotFoundError(what)
        case 409:
            raise ApiConflictError(what)
        case 410:
            raise ApiGoneError(what)
        case status if status == 429 or status >= 500:
            raise ApiAwayError(what)
        case _:
            raise ApiRefusedError(what)
