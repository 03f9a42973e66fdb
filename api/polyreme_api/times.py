"""Times as Kubernetes writes them: RFC 3339 text in UTC, and back to seconds since the epoch."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

from polyreme_api.errors import InvalidConfigError

_KEPT = 4096
"""Times that are kept: a status is read many times, its times are few."""


def rfc3339(at_s: float) -> str:
    """Write a time with microseconds, as ``metav1.MicroTime`` does."""
    # Several times faster than strftime; the offset is always +00:00.
    return f"{datetime.fromtimestamp(at_s, UTC).isoformat(timespec='microseconds')[:-6]}Z"


@functools.lru_cache(maxsize=_KEPT)
def parse_rfc3339(text: str) -> float:
    """Read a time back [s since the epoch].

    Raises:
        InvalidConfigError: If the text is no RFC 3339 time, with its offset.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidConfigError(f"not a time: {text!r}, expected RFC 3339, such as 2026-01-31T12:00:00Z") from error
    if at.tzinfo is None:
        raise InvalidConfigError(
            f"not a time: {text!r} has no UTC offset, expected RFC 3339, such as 2026-01-31T12:00:00Z"
        )
    return at.timestamp()
