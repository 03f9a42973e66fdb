"""The message of a process's exit, made fit for a status that everybody may read."""

from __future__ import annotations

import re

from polyreme_api.progress import MESSAGE_CHARACTERS_MAX

_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+(?=@)")
"""User and password of a URL."""
_HIDDEN = "***"


def short_sentence(text: str) -> str:
    """Return one line of bounded length, without the credentials of URLs."""
    return _CREDENTIALS.sub(_HIDDEN, " ".join(text.split()))[:MESSAGE_CHARACTERS_MAX]
