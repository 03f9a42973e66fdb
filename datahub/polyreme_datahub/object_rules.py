"""Rules that every object store keeps: valid keys, how often a request is tried, what may be put."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import Data

TRIES_MAX = 4
RETRY_DELAY_S = 0.05

Sleep = Callable[[float], None]


def delay_s(tried: int) -> float:
    """Return the wait after a failed try [s]."""
    return RETRY_DELAY_S * 2.0 ** (tried - 1)


def checked_key(key: str) -> str:
    """Return the key.

    Raises:
        InvalidConfigError: If it is no relative path, or leaves the root.
    """
    if not key or any(part in {"", ".", ".."} for part in key.split("/")):
        raise InvalidConfigError(f"not an object key: {key!r}, keys are relative paths without empty, . or .. parts")
    return key


def parts_of(data: Data) -> Sequence[bytes | memoryview]:
    """Return the parts of what is put."""
    return [data] if isinstance(data, bytes) else data
