"""Differences between JSON-able values, field by field."""

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


def leaves(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each field of a value that holds no other fields, named as by ``differences``.

    Args:
        field: Name of the value itself.
        value: The value.
    """
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(f"{field}.{name}", inner)
    elif isinstance(value, list) and value:
        for at, inner in enumerate(value):
            yield from leaves(f"{field}[{at}]", inner)
    else:
        yield field, value
