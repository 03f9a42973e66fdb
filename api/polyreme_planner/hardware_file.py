"""A row of hardware of the user's own, as JSON data.

::

    {"format": "polyreme.dev/hardware/v1", "like": "h100-80g", "name": "h100-roce", "farBytesPerS": 10e9}

``like`` names the row whose figures hold where the file has none; without it all figures are needed but those with a
default. Keys are the fields of ``Hardware``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.hardware import HARDWARE, PROCESSOR, Hardware

HARDWARE_FORMAT = "polyreme.dev/hardware/v1"
FIELD = "--hardware-file"
_WHOLE = ("memory_bytes", "near_devices")
_SHARES = ("usable_share", "float32_share", "tf32_share")
_MAY_BE_ZERO = ("near_latency_s", "far_latency_s", "launch_s")
_OWN = ("device_name", "in_memory")
"""Fields that a file can't set."""


def _key(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


_FIELDS = {_key(field.name): field.name for field in dataclasses.fields(Hardware) if field.name not in _OWN}


def hardware_from_json(text: str) -> Hardware:
    """Read a row.

    Raises:
        InvalidConfigError: If it is something else, a figure is missing, unknown or out of its range, or the name is
            one of the table.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != HARDWARE_FORMAT:
            raise ValueError(f"no object with format {HARDWARE_FORMAT!r}")
        return _row(data)
    except (ValueError, TypeError) as error:
        raise InvalidConfigError(f"hardware can't be read: {error}", field=FIELD) from error


def _row(data: dict[str, Any]) -> Hardware:
    like = data.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in HARDWARE or like == PROCESSOR):
        known = ", ".join(name for name in HARDWARE if name != PROCESSOR)
        raise ValueError(f"like {like!r} is not an accelerator of the table: {known}")
    if unknown := [key for key in data if key not in _FIELDS]:
        raise ValueError(f"unknown figure {unknown[0]!r}, figures are {', '.join(_FIELDS)}")
    given = {_FIELDS[key]: _checked(key, value) for key, value in data.items()}
    if not given.get("name") or given["name"] in HARDWARE:
        raise ValueError(f"name {given.get('name')!r} is missing or that of a row of the table")
    if like is not None:
        return dataclasses.replace(HARDWARE[like], **given)
    needed = [field.name for field in dataclasses.fields(Hardware) if field.default is dataclasses.MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"{_key(missing[0])} is missing, and no like names a row to take it from")
    return Hardware(**given)


def _checked(key: str, value: Any) -> Any:
    name = _FIELDS[key]
    if name == "name":
        if not isinstance(value, str):
            raise ValueError(f"name is {value!r}, expected a text")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, expected a number")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ValueError(f"{key} is {value}, expected more than 0")
    if name in _SHARES and value > 1:
        raise ValueError(f"{key} is {value}, expected at most 1")
    return int(value) if name in _WHOLE else value
