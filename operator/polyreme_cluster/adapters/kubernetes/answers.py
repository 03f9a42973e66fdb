"""The API server's refusals as the port's errors (``metav1.Status``, and the codes of the HTTP API's conventions)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyreme_cluster.port import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidObjectError,
    NotFoundError,
    PortError,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    UnauthorizedError,
)

RETRY_AFTER_S = 1.0
"""Wait where a server that sheds load does not say how long."""
RETRY_AFTER_MAX_S = 300.0
MESSAGE_CHARACTERS_MAX = 1_000
_REFUSED = {400, 405, 406, 413, 415, 422}


def error_of(what: str, code: int, body: bytes, headers: Mapping[str, str]) -> PortError:
    """Return the error that an answer of 400 or more stands for.

    Args:
        what: The call, as ``PATCH Pod default/x``.
        code: HTTP status.
        body: A ``Status`` object, or whatever a proxy says.
        headers: Headers of the answer.
    """
    status = _status(body)
    raw_delay = headers.get("Retry-After") or (status.get("details") or {}).get("retryAfterSeconds")
    return error_of_status(what, {**status, "code": code}, delay_s=_delay_s(raw_delay))


def error_of_status(what: str, status: Mapping[str, Any], *, delay_s: float = RETRY_AFTER_S) -> PortError:
    """Return the error that a ``Status`` object stands for; a watch sends them as events."""
    code, reason = int(status.get("code") or 500), str(status.get("reason") or "")
    message = str(status.get("message") or "no reason given")[:MESSAGE_CHARACTERS_MAX]
    text = f"{what} refused: {code} {reason}, {message}"
    causes = [cause for cause in (status.get("details") or {}).get("causes") or () if isinstance(cause, dict)]
    if code == 409:
        return AlreadyExistsError(text) if reason == "AlreadyExists" else ConflictError(text)
    if code == 404:
        return NotFoundError(text)
    if code == 410 or any(cause.get("reason") == "ResourceVersionTooLarge" for cause in causes):
        return GoneError(text)
    if code == 429:
        return TooManyRequestsError(text, delay_s=delay_s)
    if code in {408, 504}:
        return PortTimeoutError(text, delay_s=delay_s)
    if code == 401:
        return UnauthorizedError(text, delay_s=delay_s)
    if code == 403:
        return ForbiddenError(text)
    if code in _REFUSED:
        return InvalidObjectError(text, field=next((str(c["field"]) for c in causes if c.get("field")), None))
    return ServerError(text, delay_s=delay_s)


def _status(body: bytes) -> dict[str, Any]:
    try:
        status = json.loads(body)
    except ValueError:
        return {"message": body[:MESSAGE_CHARACTERS_MAX].decode(errors="replace")}
    return status if isinstance(status, dict) else {}


def _delay_s(raw: object) -> float:
    try:
        return min(RETRY_AFTER_MAX_S, max(0.0, float(str(raw))))
    except ValueError:
        # Absent, or a date, which API servers do not send.
        return RETRY_AFTER_S
