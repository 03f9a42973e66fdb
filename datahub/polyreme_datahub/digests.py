"""Digests: of bytes, of JSON-able values, of an action's key. All are sha256 in lower-case hexadecimal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest_bytes(data: bytes | memoryview) -> str:
    """Digest bytes."""
    return hashlib.sha256(data).hexdigest()


def blob_key(digest: str) -> str:
    """Key of a blob in the object store."""
    return f"blobs/sha256/{digest[:2]}/{digest[2:4]}/{digest}"


def canonical_json(value: Any) -> bytes:
    """Write a JSON-able value in its one canonical form: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_value(value: Any) -> str:
    """Digest a JSON-able value by its canonical form."""
    return digest_bytes(canonical_json(value))


def action_prefix(operation: str, version: int, parameters: Mapping[str, Any]) -> str:
    """Describe an operation with its parameters; with an input's digest it makes an action's key."""
    return f"{operation}:{version}:{digest_value(parameters)}"


def action_key(prefix: str, input_digest: str) -> str:
    """Key of an action: what is done, by which version, with which parameters, to which bytes."""
    return digest_bytes(f"{prefix}:{input_digest}".encode())
