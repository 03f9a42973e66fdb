"""Operations for tests of the runner; children import them by name."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterable, Mapping
from typing import Any

from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.values import Blob, Dropped, Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """A factor, and a label that changes nothing."""

    factor: int = 1
    label: str = ""


@operation("length", 1, inputs=("record",), blobs=False, parameters=Times)
def length(record: Value, parameters: Times) -> Value:
    """The number in a record's id, times a factor."""
    return Value.of({"length": int(record.data["id"].rpartition("-")[2]) * parameters.factor})


@operation("parity", 1, inputs=("length",), blobs=False, parameters=Times)
def parity(measured: Value, parameters: Times) -> Value:
    """Whether a length is odd."""
    return Value.of({"odd": measured.data["length"] % 2, "factor": parameters.factor})


@operation("print", 1, inputs=("length",), blobs=False, parameters=Times)
def print_length(measured: Value, parameters: Times) -> Value:
    """Make a blob of a length."""
    made = Blob(f"{measured.data['length']}{parameters.label}".encode())
    return Value.of({"printed": made.digest}, made=[made])


@operation("count", 1, inputs=("print",))
def count_bytes(printed: Value) -> Value:
    """Count the bytes of a printed length."""
    return Value.of({"bytes": len(printed.blobs[printed.data["printed"]].data)})


@operation("keep-even", 1, inputs=("parity",), blobs=False)
def keep_even(seen: Value) -> Value:
    """Drop what is odd."""
    if seen.data["odd"]:
        raise Dropped("odd")
    return Value.of({"even": True})


@operation("fragile", 1, inputs=("record",), blobs=False)
def fragile(record: Value) -> Value:
    """Fail on one record, kill the own process on another."""
    if record.data["id"].endswith("-000003"):
        raise ZeroDivisionError("bug")
    if record.data["id"].endswith("-000005"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return Value.of({"good": True})


@operation("first-of-each", 1, inputs=("parity",), blobs=False, barrier=True)
def first_of_each(rows: Iterable[Any]) -> Mapping[int, str]:
    """Keep the first of each parity."""
    seen: dict[Any, str] = {}
    dropped: dict[int, str] = {}
    for row in rows:
        value = row.inputs[0]["odd"]
        if value in seen:
            dropped[row.ordinal] = f"as {seen[value]}"
        else:
            seen[value] = row.sample_id
    return dropped


@operation("after", 1, inputs=("parity",), blobs=False)
def after(seen: Value) -> Value:
    """A step after the barrier."""
    return Value.of({"after": seen.data["odd"]})
