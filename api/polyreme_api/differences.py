"""Differences between two JSON-able values, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def differences(field: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each field that differs, as ``spec.training.stages[0].steps``, with both values; None: there is none.

    Args:
        field: Name of the values themselves.
        before: One value.
        after: The other.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from differences(f"{field}.{name}", before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(f"{field}[{at}]", old, new)
    elif before != after:
        yield field, before, after
