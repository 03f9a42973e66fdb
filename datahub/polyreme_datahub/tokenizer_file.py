"""The stored form of a tokenizer: ``tokenizer.json`` alone, or with the chat template of a released one.

A trained tokenizer is stored as the file that it is. Of a released one the template is a part of what data is made
with, so it is stored with the file, under one digest. Imports no tokenizer: ranks read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.digests import canonical_json

FORMAT = "polyreme-tokenizer/1"
_BEGINS = b'{"format":"polyreme-tokenizer/'


def with_template(tokenizer: bytes, template: Mapping[str, Any]) -> bytes:
    """Return the stored form of a released tokenizer.

    Args:
        tokenizer: Content of its ``tokenizer.json``.
        template: Content of its ``polyreme-template.json``.
    """
    return canonical_json({"format": FORMAT, "template": dict(template), "tokenizer": tokenizer.decode()})


def split_template(stored: bytes) -> tuple[bytes, Mapping[str, Any] | None]:
    """Return ``tokenizer.json`` of a stored tokenizer, and its template; None for one that a job has trained."""
    if not stored.startswith(_BEGINS):
        return stored, None
    value = json.loads(stored)
    return value["tokenizer"].encode(), value["template"]


def tokenizer_json(stored: bytes) -> bytes:
    """Return ``tokenizer.json`` of a stored tokenizer."""
    return split_template(stored)[0]
