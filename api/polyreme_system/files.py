"""Small files that a reader must never see half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one.

    Args:
        path: The file; its folder is made when it does not exist.
        text: Its content.
        mode: Its permissions.
        durable: Whether it must survive the machine's crash, and not only a process'.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode=mode)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None when there is no such file, or it holds none: what it said is gone either way."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
