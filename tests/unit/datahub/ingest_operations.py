"""Operations for tests of ingestion; children import them by name, and look at a file for what is broken now."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.values import Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A file; while it is there, the operation is broken."""

    broken: str = ""
    weight: int = 1


@operation("shouting", 1, inputs=("record",), blobs=False, parameters=Switch)
def shouting(record: Value, parameters: Switch) -> Value:
    """Upper-case the last answer; broken, it fails on every third record and names an object."""
    number = int(record.data["id"].removeprefix("r"))
    if parameters.broken and Path(parameters.broken).exists() and number % 3 == 0:
        raise RuntimeError(f"can't shout {object()}")
    return Value.of({"text": record.data["conversations"][-1]["content"].upper(), "weight": parameters.weight})


@operation("counting", 1, inputs=("shouting",), blobs=False)
def counting(shouted: Value) -> Value:
    """Count the letters of a text."""
    return Value.of({"letters": len(shouted.data["text"])})
