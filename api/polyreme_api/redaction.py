"""Text without secrets: what logs show of tokens and passwords, in whichever process writes the line."""

from __future__ import annotations

import re

HIDDEN = "***"
_VALUE = re.compile(
    r"(?i)(\bbearer\s+)[\w.~+/=-]+"
    r"|((?:token|secret|password|passwd|api[-_]?key)[\"']?\s*[:=]\s*[\"']?)[^\s\"',;&}]{4,}"
    r"|(://[^\s/:@]+:)[^\s/@]+(?=@)"
)
"""Bearer tokens, ``password=...`` in whatever notation, passwords in URLs; each after what is kept of it.

Linear in the length of the text: a line of a training process may be long and hold anything."""
_JWT = re.compile(r"\beyJ[\w-]{8,1024}+\.[\w-]{8,}+\.[\w-]*")
_MARKS = ("token", "secret", "passw", "key", "://", "bearer")
"""One of these is in every text that holds a secret, in lower case: most lines have none, and cost no search."""


def hide(text: str) -> str:
    """Replace what looks like a secret."""
    if "eyJ" in text:
        text = _JWT.sub(HIDDEN, text)
    lowered = text.lower()
    if not any(mark in lowered for mark in _MARKS):
        return text
    return _VALUE.sub(lambda found: next(group for group in found.groups() if group is not None) + HIDDEN, text)
