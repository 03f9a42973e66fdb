"""URLs of object stores and folders: their kinds, passwords inside them, and how a message shows them."""

from __future__ import annotations

import re
from urllib.parse import unquote

from polyreme_api.errors import InvalidConfigError

HIDDEN = "***"
_USER_INFO = re.compile(r"[a-z][a-z0-9+.-]*://[^:/@?#\[\s]*:(?!\d{1,5}(?:/|$))[^@\s]+@", re.IGNORECASE)
"""A user and a password before ``@``. A password may hold a slash, as database drivers accept; a port is none."""
_PARAMETER = re.compile(
    r"[a-z][a-z0-9+.-]*:/[^?\s]*\?(?:[^\s]*&)?(?:password|passwd|pwd|sslpassword|secret|token)=[^&\s]", re.IGNORECASE
)
_SCHEME = re.compile(r"[a-z0-9+.-]+", re.IGNORECASE)
_PASSWORD = re.compile(r"(password|passwd|pwd|secret|token)=[^&]*", re.IGNORECASE)


def is_bucket(url: str) -> bool:
    """Tell whether a URL names a bucket of an S3 server: ``s3://bucket/prefix``."""
    return url[:5].lower() == "s3://"


def is_folder(url: str) -> bool:
    """Tell whether a URL names a folder: ``file:///absolute/path``."""
    return url[:7].lower() == "file://"


def folder_path(url: str, *, field: str, expected: str = "file:///absolute/path") -> str:
    """Return the absolute path of a ``file://`` URL.

    Args:
        url: The URL.
        field: Field that holds it, for the message.
        expected: What the field may hold, for the message.

    Raises:
        InvalidConfigError: If it is another kind of URL, or names another host.
    """
    host, _, path = url[len("file://") :].partition("/")
    if not is_folder(url) or host not in {"", "localhost"} or not path.strip("/"):
        raise InvalidConfigError(f"not a local folder: {masked(url)!r}, expected {expected}", field=field)
    return "/" + unquote(path)


def has_password(text: str) -> bool:
    """Tell whether a text holds a URL with a password, in its user information or in a parameter.

    Configuration must hold none, since it is shown in specs, process lists and logs.
    """
    return bool(_USER_INFO.search(text) or _PARAMETER.search(text))


def masked(url: str) -> str:
    """Return a URL as a message may show it: without user and password, however badly it is written."""
    before, at, place = url.rpartition("@")
    if at:
        scheme, separator, _ = before.partition("://")
        known = scheme + separator if separator and _SCHEME.fullmatch(scheme) else ""
        url = known + HIDDEN + at + place
    return _PASSWORD.sub(rf"\1={HIDDEN}", url)
