"""URLs of places on this machine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from polyreme_api.errors import InvalidConfigError


def local_folder(url: str, *, field: str) -> Path:
    """Turn a ``file://`` URL into a path.

    Raises:
        InvalidConfigError: If it is another kind of URL.
    """
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not parts.path:
        raise InvalidConfigError(
            f"no local folder: {url!r}, this version takes file:///absolute/path URLs", field=field
        )
    return Path(unquote(parts.path))
