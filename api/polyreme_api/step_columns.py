"""Columns of a closed segment of a step log: a header line of JSON, then one array after another.

They repeat what the JSON Lines beside them say, so that readers need not parse those: a segment that is torn, damaged
or missing costs time and nothing else. All numbers are 64 bits wide and little-endian, and so exact.
"""

from __future__ import annotations

import array
import dataclasses
import itertools
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

from pydantic import ValidationError

from polyreme_api.progress import ALL_SETS, StepRecord

FORMAT = 1
Unit = Literal["bytes", "parts"]
"""In what a log counts: bytes of its one file, or its parts."""
_TYPES: Mapping[Any, str] = {int: "q", float: "d"}
_FIELDS = StepRecord.model_fields
_CODES = {name: _TYPES[field.annotation] for name, field in _FIELDS.items() if field.annotation in _TYPES}
_TEXTS = tuple(name for name, field in _FIELDS.items() if field.annotation is str)
_REST = {name for name in _FIELDS if name not in _CODES and name not in _TEXTS}
"""Fields that few steps have: kept as JSON by place."""
Rest: TypeAlias = Mapping[int, Mapping[str, Any]]


class StepTable(Sequence[StepRecord]):
    """Step records as columns; a record is made when it is asked for."""

    def __init__(self, columns: Mapping[str, Sequence[Any]], rest: Rest, length: int) -> None:
        self._columns, self.rest, self._length = columns, rest, length

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> StepTable:
        """Return records as a table."""
        columns: dict[str, Sequence[Any]] = {
            name: array.array(code, (getattr(record, name) for record in records)) for name, code in _CODES.items()
        }
        columns |= {name: [getattr(record, name) for record in records] for name in _TEXTS}
        rest = {}
        for place, record in enumerate(records):
            if kept := record.model_dump(include=_REST, exclude_defaults=True):
                rest[place] = kept
        return cls(columns, rest, len(records))

    @classmethod
    def join(cls, tables: Sequence[StepTable]) -> StepTable:
        """Return tables one after another."""
        if len(tables) == 1:
            return tables[0]
        columns: dict[str, Any] = {name: array.array(code) for name, code in _CODES.items()}
        columns |= {name: [] for name in _TEXTS}
        rest: dict[int, Mapping[str, Any]] = {}
        length = 0
        for table in tables:
            for name, column in columns.items():
                column.extend(table.column(name))
            rest |= {length + place: kept for place, kept in table.rest.items()}
            length += len(table)
        return cls(columns, rest, length)

    def column(self, name: str) -> Sequence[Any]:
        """Return one number or text of every step."""
        return self._columns[name]

    def sparse(self, name: str) -> Mapping[int, Any]:
        """Return a field that few steps have, by the places of those that have it."""
        return {place: kept[name] for place, kept in self.rest.items() if name in kept}

    def with_column(self, name: str, values: Sequence[Any]) -> StepTable:
        """Return the table with other numbers in a column."""
        return StepTable({**self._columns, name: array.array(_CODES[name], values)}, self.rest, self._length)

    def take(self, places: Sequence[int]) -> StepTable:
        """Return the steps at some places."""
        columns: dict[str, Sequence[Any]] = {
            name: array.array(code, map(self._columns[name].__getitem__, places)) for name, code in _CODES.items()
        }
        columns |= {name: [self._columns[name][at] for at in places] for name in _TEXTS}
        rest = {new: self.rest[at] for new, at in enumerate(places) if at in self.rest}
        return StepTable(columns, rest, len(places))

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._length

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...

    @overload
    def __getitem__(self, place: slice) -> StepTable: ...

    def __getitem__(self, place: int | slice) -> StepRecord | StepTable:
        """Return a record, or consecutive ones as a table."""
        if isinstance(place, slice):
            first, last, step = place.indices(self._length)
            if (first, last, step) == (0, self._length, 1):
                return self
            if step != 1:
                return StepTable.of([self[at] for at in range(first, last, step)])
            rest = {at - first: kept for at, kept in self.rest.items() if first <= at < last}
            columns = {name: column[first:last] for name, column in self._columns.items()}
            return StepTable(columns, rest, max(0, last - first))
        at = place + self._length if place < 0 else place
        if not 0 <= at < self._length:
            raise IndexError(f"step {place} of {self._length}")
        values = {name: column[at] for name, column in self._columns.items()}
        return StepRecord.model_construct(**values, **self.rest.get(at, {}))


def table_of(records: Sequence[StepRecord]) -> StepTable:
    """Return records as a table; one that is a table already stays as it is."""
    return records if isinstance(records, StepTable) else StepTable.of(records)


def column_of(records: Sequence[StepRecord], name: str) -> Sequence[Any]:
    """Return one number or text of every step, of a table without making its records."""
    return records.column(name) if isinstance(records, StepTable) else [getattr(each, name) for each in records]


def by_attempt(records: Sequence[StepRecord]) -> dict[int, StepTable]:
    """Return the steps of each attempt, in the order in which attempts appear."""
    table, parts, first = table_of(records), dict[int, list[StepTable]](), 0
    for attempt, run in itertools.groupby(table.column("attempt")):
        last = first + sum(1 for _ in run)
        parts.setdefault(attempt, []).append(table[first:last])
        first = last
    return {attempt: StepTable.join(each) for attempt, each in parts.items()}


def held_out_losses(records: Sequence[StepRecord]) -> list[tuple[int, float]]:
    """Return step and held-out loss of the steps after which that of all sets was measured."""
    table = table_of(records)
    steps = table.column("step")
    return [(steps[at], sets[ALL_SETS]) for at, sets in table.sparse("held_out").items() if ALL_SETS in sets]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A closed segment: its steps, and from where to where of the log it reaches."""

    table: StepTable
    unit: Unit
    start: int
    end: int


def encode(segment: Segment) -> bytes:
    """Return a segment as it is stored."""
    table = segment.table
    numbers = {name: array.array(code, table.column(name)) for name, code in _CODES.items()}
    if sys.byteorder == "big":
        for column in numbers.values():
            column.byteswap()
    body = b"".join(column.tobytes() for column in numbers.values())
    texts = {name: [(text, len(list(run))) for text, run in itertools.groupby(table.column(name))] for name in _TEXTS}
    head = {
        "format": FORMAT,
        "unit": segment.unit,
        "start": segment.start,
        "end": segment.end,
        "steps": len(table),
        "crc32": zlib.crc32(body),
        "columns": _CODES,
        "texts": texts,
        "rest": sorted(table.rest.items()),
    }
    return json.dumps(head).encode() + b"\n" + body


def decode(data: bytes) -> Segment | None:
    """Read a segment; None if it is damaged, or of another format: its log says the same."""
    line, _, body = data.partition(b"\n")
    try:
        head = json.loads(line)
        steps, codes = int(head["steps"]), head["columns"]
        if head["format"] != FORMAT or zlib.crc32(body) != head["crc32"] or len(body) != 8 * steps * len(codes):
            return None
        columns = {name: column for name, column in _columns(body, codes, steps).items() if name in _CODES}
        for name, field in _FIELDS.items():
            if name in _CODES and name not in columns:
                columns[name] = array.array(_CODES[name], [field.get_default()]) * steps
        texts = {
            name: [text for text, count in head["texts"].get(name, [["", steps]]) for _ in range(count)]
            for name in _TEXTS
        }
        rest = {int(place): {key: kept[key] for key in kept if key in _REST} for place, kept in head["rest"]}
        table = StepTable({**columns, **texts}, rest, steps)
        return Segment(table=table, unit=head["unit"], start=int(head["start"]), end=int(head["end"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _columns(body: bytes, codes: Mapping[str, str], steps: int) -> dict[str, array.array[Any]]:
    columns = {}
    for number, (name, code) in enumerate(codes.items()):
        column = array.array(code)
        column.frombytes(body[8 * steps * number : 8 * steps * (number + 1)])
        if sys.byteorder == "big":
            column.byteswap()
        columns[name] = column
    return columns


def parse_steps(data: bytes) -> list[StepRecord]:
    """Read step records of JSON Lines; a last line without its end was torn by a crash and is no record."""
    records = []
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            records.append(StepRecord.model_validate_json(line))
        except ValidationError:
            break
    return records
