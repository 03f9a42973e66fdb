"""Passwords inside URLs: configuration must not hold them, since it is shown in specs, process lists and logs."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"[a-z][a-z0-9+.-]*://[^:/@?#\[\s]*:(?!\d{1,5}(?:/|$))[^@\s]+@", re.IGNORECASE)
"""A user and a password before ``@``. A password may hold a slash, as database drivers accept; a port is none."""
_PARAMETER = re.compile(
    r"[a-z][a-z0-9+.-]*:/[^?\s]*\?(?:[^\s]*&)?(?:password|passwd|pwd|sslpassword|secret|token)=[^&\s]", re.IGNORECASE
)


def has_password(text: str) -> bool:
    """Tell whether a text holds a URL with a password, in its user information or in a parameter."""
    return bool(_USER_INFO.search(text) or _PARAMETER.search(text))
