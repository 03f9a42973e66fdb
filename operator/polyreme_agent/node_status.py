"""Writes conditions to this node's status, and nothing else, by the standard library's HTTP client."""

from __future__ import annotations

import dataclasses
import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 4 << 20
TOKEN_BYTES_MAX: Final = 16_384
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATCH: Final = "application/strategic-merge-patch+json"


class WriteError(Exception):
    """The API server refused or did not answer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the API server is, and by which account it is called."""

    host: str
    port: int
    token: Path
    """Read before each call: a bound token is renewed in place."""
    authority: Path

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], account: Path = ACCOUNT) -> Server:
        """Return what a pod is given.

        Raises:
            ValueError: If the environment names no API server.
        """
        host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port.isdigit():
            raise ValueError(f"KUBERNETES_SERVICE_HOST is {host!r} and _PORT is {port!r}: run this in a pod")
        return cls(host=host, port=int(port), token=account / "token", authority=account / "ca.crt")


class NodeStatus:
    """The status of one node."""

    def __init__(self, server: Server, node: str) -> None:
        self._server, self._path = server, f"/api/v1/nodes/{quote(node, safe='')}/status?fieldManager=polyreme-agent"
        self._connection: http.client.HTTPSConnection | None = None
        self._authority_at: float | None = None

    def patch(self, body: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """Write, and return status and message of the node's conditions by type.

        Raises:
            WriteError: If it was not stored, or may not have been.
        """
        try:
            return self._patch(json.dumps(body).encode())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise WriteError(f"{self._server.host}:{self._server.port}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _patch(self, body: bytes) -> dict[str, tuple[str, str]]:
        with self._server.token.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
        connection = self._connect()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": _PATCH, "Accept": "application/json"}
        try:
            connection.request("PATCH", self._path, body, headers)
            response = connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):
            # The server closed a connection that was idle.
            self.close()
            connection = self._connect()
            connection.request("PATCH", self._path, body, headers)
            response = connection.getresponse()
        answer = response.read(ANSWER_BYTES_MAX)
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}: {answer[:300].decode('utf-8', 'replace')}")
        if response.length:
            raise ValueError(f"the node has more than {ANSWER_BYTES_MAX} bytes")
        conditions = (json.loads(answer).get("status") or {}).get("conditions") or []
        return {each["type"]: (str(each.get("status")), str(each.get("message") or "")) for each in conditions}

    def _connect(self) -> http.client.HTTPSConnection:
        changed = self._server.authority.stat().st_mtime
        if self._connection is None or changed != self._authority_at:
            self.close()
            context = ssl.create_default_context(cafile=str(self._server.authority))
            self._authority_at = changed
            self._connection = http.client.HTTPSConnection(
                self._server.host, self._server.port, timeout=TIMEOUT_S, context=context
            )
        return self._connection
