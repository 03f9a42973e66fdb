"""Where a local object store lies."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from polyreme_api.errors import InvalidConfigError


def local_root(url: str) -> Path:
    """Return the directory of a ``file://`` URL.

    Raises:
        InvalidConfigError: If the URL has another scheme or names another host.
    """
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise InvalidConfigError(
            f"no object store for {url!r}: expected file:///absolute/directory or s3://bucket/prefix",
            field="the objects URL",
        )
    return Path(unquote(parts.path))
