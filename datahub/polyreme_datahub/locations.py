"""Places by URL: the directory of a local object store, and how a URL is written in a message."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from polyreme_api.errors import InvalidConfigError

HIDDEN = "***"
_SCHEME = re.compile(r"[a-z0-9+.-]+", re.IGNORECASE)
_PASSWORD = re.compile(r"(password|passwd|pwd|secret|token)=[^&]*", re.IGNORECASE)


def local_root(url: str) -> Path:
    """Return the directory of a ``file://`` URL.

    Raises:
        InvalidConfigError: If the URL has another scheme or names another host.
    """
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise InvalidConfigError(
            f"no object store for {masked(url)!r}: expected file:///absolute/directory or s3://bucket/prefix",
            field="the objects URL",
        )
    return Path(unquote(parts.path))


def masked(url: str) -> str:
    """Return a URL as a message may show it: without user and password, however badly it is written."""
    before, at, place = url.rpartition("@")
    if at:
        scheme, separator, _ = before.partition("://")
        known = scheme + separator if separator and _SCHEME.fullmatch(scheme) else ""
        url = known + HIDDEN + at + place
    return _PASSWORD.sub(rf"\1={HIDDEN}", url)
