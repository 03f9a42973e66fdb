"""Check a pod template against Kubernetes' types: what a field holds, not whether it makes sense.

A field that the types do not know is left alone, since a newer Kubernetes may know it (``unknown.py`` reports it); so
is one that is null, which Kubernetes takes for absent.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyreme_api.pod_template.schema import QUANTITY_PATTERN, ROOT, TYPES, FieldType

ERRORS_MAX = 10
"""Errors of one template that are looked for."""
_SHOWN_MAX = 60

_QUANTITY = re.compile(QUANTITY_PATTERN)
_Place = tuple[str | int, ...]


class PodTemplateError(ValueError):
    """Fields of a pod template have other types than Kubernetes gives them.

    Args:
        field: Path of the first of them, within the template.
        rule: What it must be, and what it is.
        count: How many were found.
    """

    def __init__(self, field: str, rule: str, *, count: int) -> None:
        self.field, self.rule, self.count = field, rule, count
        super().__init__(f"{field}: {rule}")


def check_pod_template(template: dict[str, Any]) -> dict[str, Any]:
    """Return a pod template whose known fields have Kubernetes' types.

    Raises:
        PodTemplateError: If one has another.
    """
    found = list(itertools.islice(_errors(template, ROOT, ()), ERRORS_MAX))
    if found:
        place, value, rule = found[0]
        field = ".".join(str(part) for part in place)
        raise PodTemplateError(field, f"must be {rule}, got {_seen(value)}", count=len(found))
    return template


def _errors(value: Any, kind: FieldType, place: _Place) -> Iterator[tuple[_Place, Any, str]]:
    """Yield the place, the value and the rule of everything that has another type than it should."""
    if isinstance(kind, str) and kind in _SCALARS:
        rule, holds = _SCALARS[kind]
        if not holds(value):
            yield place, value, rule
    elif kind[0] == "list":
        if not isinstance(value, list):
            yield place, value, "a list"
            return
        for at, item in enumerate(value):
            yield from _errors(item, kind[1], (*place, at))
    elif not isinstance(value, Mapping):
        yield place, value, "an object"
    elif isinstance(kind, list):
        for key, item in value.items():
            yield from _errors(item, kind[1], (*place, str(key)))
    else:
        fields = TYPES[kind]
        for name, inner in value.items():
            if inner is not None and name in fields:
                yield from _errors(inner, fields[name], (*place, str(name)))


def _is_integer(bits: int) -> Callable[[Any], bool]:
    limit = 1 << (bits - 1)
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and -limit <= value < limit


def _is_quantity(value: Any) -> bool:
    if isinstance(value, str):
        return _QUANTITY.fullmatch(value) is not None
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


_SCALARS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "string": ("a string", lambda value: isinstance(value, str)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "int32": ("an integer of 32 bits", _is_integer(32)),
    "int64": ("an integer of 64 bits", _is_integer(64)),
    "intOrString": ("an integer or a string", lambda value: isinstance(value, str) or _is_integer(32)(value)),
    "quantity": ('a quantity such as 2, "500m" or "8Gi"', _is_quantity),
    "object": ("an object", lambda value: isinstance(value, Mapping)),
}
"""Types that have no parts: the rule, and whether a value follows it."""


def _seen(value: Any) -> str:
    """Describe a value: what it is, and the beginning of it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int | float):
        return f"the number {_cut(str(value) if isinstance(value, float) else _integer_text(value))}"
    text = _cut(str(value))
    return f'the string "{text}"'


def _integer_text(value: int) -> str:
    """Write a number, unless it has more digits than Python writes."""
    return str(value) if value.bit_length() <= 256 else f"of {value.bit_length()} bits"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
