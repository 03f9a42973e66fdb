"""Reading the times that other writers left on objects."""

from __future__ import annotations

from typing import overload

from polyreme_api.errors import InvalidConfigError
from polyreme_api.times import parse_rfc3339


@overload
def parse_time_or(text: object, default: float) -> float: ...


@overload
def parse_time_or(text: object, default: None) -> float | None: ...


def parse_time_or(text: object, default: float | None) -> float | None:
    """Return seconds since the epoch, or the default for what is no time: others' fields must not stop us."""
    if not isinstance(text, str) or not text:
        return default
    try:
        return parse_rfc3339(text)
    except InvalidConfigError:
        return default
