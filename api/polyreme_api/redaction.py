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
_NAMED = {
    mark: re.compile(rf"{name}[\"']?\s*[:=]")
    for mark, name in {
        "token": "token",
        "secret": "secret",
        "passw": "passw(?:or)?d",
        "key": "api[-_]?key",
    }.items()
}
"""For lower case: what comes before a secret's value, by letters without which it can't be there."""


def hide(text: str) -> str:
    """Replace what looks like a secret."""
    if "eyJ" in text:
        text = _JWT.sub(HIDDEN, text)
    if not _may_hold_one(text.lower()):
        return text
    return _VALUE.sub(lambda found: next(group for group in found.groups() if group is not None) + HIDDEN, text)


def _may_hold_one(lowered: str) -> bool:
    """Tell whether the search is worth its time: most lines hold no secret, though many say how many tokens."""
    if "bearer" in lowered or ("@" in lowered and "://" in lowered):
        return True
    return any(mark in lowered and named.search(lowered) for mark, named in _NAMED.items())
