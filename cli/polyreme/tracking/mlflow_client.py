"""MLflow's REST interface over aiohttp: one request at a time, its answers sorted into what to do next.

Credentials come from the environment, by the names that MLflow's own clients read.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, NotFoundError, RefusedError, RetryableError

FIELD = "the URL of MLflow"
TIMEOUT_S = 20.0
SAID_MAX = 300
"""Characters of a server's refusal that are shown."""
TOKEN, USER, PASSWORD = "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
INSECURE, CERTIFICATES = "MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_TRACKING_SERVER_CERT_PATH"
_TOO_MANY, _FORBIDDEN, _SERVER_ERROR = 429, (401, 403), 500


class MlflowClient:
    """A server."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Name a server by the URL of its page.

        Raises:
            InvalidConfigError: If it is no URL, or holds a password.
        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidConfigError(f"not an MLflow server: {url!r}, expected http://HOST:PORT", field=FIELD)
        if parts.username or parts.password:
            raise InvalidConfigError(
                f"the URL of MLflow holds a user name: {parts.hostname}, expected none, since other users of the "
                f"machine can read it; set {USER} and {PASSWORD}, or {TOKEN}",
                field=FIELD,
            )
        self.url = url.partition("#")[0].rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    def get(self, path: str, query: Mapping[str, str], *, part: str) -> dict[str, Any]:
        """Read; errors as of ``post``."""
        return self._part(asyncio.run(self._call("GET", path, params=query)), part)

    def post(self, path: str, body: Mapping[str, Any], *, part: str = "") -> dict[str, Any]:
        """Call; ``part`` names the object of the answer that is returned, the whole one without.

        Raises:
            RetryableError: If the server is away or busy, or has an error of its own.
            NotFoundError: If it has no such object.
            RefusedError: If it does not take the credentials or the request.
            InvalidConfigError: If it is no MLflow server.
        """
        return self._part(asyncio.run(self._call("POST", path, json=body)), part)

    def _part(self, answer: dict[str, Any], name: str) -> dict[str, Any]:
        found = answer.get(name) if name else answer
        if not isinstance(found, dict):
            raise InvalidConfigError(f"not an MLflow server: {self.url} gave an answer without {name!r}", field=FIELD)
        return found

    async def _call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        url = f"{self.url}/api/2.0/mlflow/{path}"
        try:
            # trust_env: the machine's proxy. No redirects: they would carry the token to another host.
            async with (
                aiohttp.ClientSession(timeout=self._timeout, trust_env=True) as session,
                session.request(
                    method, url, headers=_headers(), ssl=_tls(), allow_redirects=False, **content
                ) as response,
            ):
                said = await response.text(errors="replace")
                status, kind = response.status, response.content_type
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise InvalidConfigError(f"not an MLflow server: {self.url!r} is no URL", field=FIELD) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or f"no answer within {self._timeout.total:g} s"
            raise RetryableError(f"MLflow does not answer: {self.url} ({why})", field=FIELD) from error
        return self._sorted(status, kind, said)

    def _sorted(self, status: int, kind: str, said: str) -> dict[str, Any]:
        """Return an answer, or raise what to do next."""
        if status in _FORBIDDEN:
            raise RefusedError(
                f"MLflow refuses the credentials: {self.url} answered {status}, expected a valid token or user",
                field=f"{TOKEN}, or {USER} and {PASSWORD}",
            )
        if status == _TOO_MANY or status >= _SERVER_ERROR:
            raise RetryableError(f"MLflow fails: {self.url} answered {status}: {said[:SAID_MAX]}", field=FIELD)
        answer = _object(said)
        if answer is None or (status != 200 and "error_code" not in answer):
            raise InvalidConfigError(
                f"not an MLflow server: {self.url} answered {status} with {kind}, expected MLflow's REST interface",
                field=FIELD,
            )
        if status == 200:
            return answer
        words = f"{answer['error_code']}: {str(answer.get('message', ''))[:SAID_MAX]}"
        if answer["error_code"] in {"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"}:
            raise NotFoundError(f"MLflow has no such object: {words}", field=FIELD)
        raise RefusedError(f"MLflow refuses a request: {words}", field="what it names")


def _object(said: str) -> dict[str, Any] | None:
    try:
        answer = json.loads(said)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _headers() -> dict[str, str]:
    """As MLflow's clients choose: user and password before a token."""
    user, password, token = (os.environ.get(name, "") for name in (USER, PASSWORD, TOKEN))
    if user and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls() -> ssl.SSLContext | bool:
    if os.environ.get(INSECURE, "").lower() in {"true", "1"}:
        return False
    path = os.environ.get(CERTIFICATES)
    try:
        return ssl.create_default_context(cafile=path) if path else True
    except OSError as error:
        raise EnvironmentFailedError(f"no certificates: {path} can't be read", field=CERTIFICATES) from error
