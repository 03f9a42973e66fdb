"""Fields of a job's spec as lists of runs show, filter and sort them."""

from __future__ import annotations

import json
from typing import Any

from polyreme_api.differences import leaves

VALUE_CHARACTERS_MAX = 200
JOB_FIELDS_MAX = 2_000
"""Fields of one job that are kept: a mixture of 256 sources has a thousand."""
LEFT_OUT = "workers.template"
"""The pod template is no hyper-parameter, and its environment may hold secrets."""


def fields_of(spec: Any) -> list[tuple[str, Any]]:
    """Return the fields below spec that are set, with values that can be compared and sorted."""
    found = []
    for field, value in leaves("", spec):
        name = field.removeprefix(".")
        if value is not None and not name.startswith(LEFT_OUT):
            found.append((name, stored_value(value)))
    return found[:JOB_FIELDS_MAX]


def stored_value(value: Any) -> Any:
    """Return a value as the table has it: numbers sort as numbers, also those that the API writes as text."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return value if abs(value) < 2**63 else str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return float(text) if text.strip() == text and text[:1] in "0123456789-." and text else text
    except ValueError:
        return text[:VALUE_CHARACTERS_MAX]


def spellings_of(text: str) -> tuple[Any, Any]:
    """Return what a field may hold that a person typed: the text, or the number that it writes."""
    try:
        return text, int(text) if abs(int(text)) < 2**63 else text
    except ValueError:
        return text, stored_value(text)
