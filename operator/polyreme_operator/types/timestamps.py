"""Kubernetes timestamps (RFC 3339, UTC) and seconds since the epoch."""

from __future__ import annotations

import datetime

from polyreme_api.errors import InvalidConfigError


def parse_time(text: str) -> float:
    """Return seconds since the epoch.

    Raises:
        InvalidConfigError: If the text is no RFC 3339 time.
    """
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise InvalidConfigError(f"no timestamp: {text!r}, rule RFC 3339 as 2026-01-31T12:00:00Z") from error


def parse_time_or(text: object, default: float | None) -> float | None:
    """Return seconds since the epoch, or the default for what is no time: other writers' fields must not stop us."""
    if not isinstance(text, str) or not text:
        return default
    try:
        return parse_time(text)
    except InvalidConfigError:
        return default


def format_time(seconds: float) -> str:
    """Write a time with microseconds, as ``metav1.MicroTime`` does."""
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
