"""Files of text that hold many records: JSON Lines, an array of JSON objects, rows with a header (CSV).

Each record is a range of the file's bytes, so that it is found again and checked without reading what is before it.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.sources.files import JSONL
from polyreme_datahub.sources.records import LINE_BYTES_MAX

ARRAY = "json"
CSV = "csv"
KINDS: Mapping[str, str] = {".jsonl": JSONL, ".ndjson": JSONL, ".json": ARRAY, ".csv": CSV, ".tsv": CSV}
"""Form of a file of a suffix."""
UNITS: Mapping[str, str] = {JSONL: "line", ARRAY: "record", CSV: "row"}
"""What a record of each form is called."""
BLOCK_BYTES = 2**18
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')
_SPACE = b" \t\r\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRecord:
    """A record's place in a file."""

    number: int
    """From 1; of a line of JSON Lines, blank ones included."""
    start: int = -1
    size: int = 0
    sha256: str = ""
    data: bytes = b""
    """Empty if it is too long."""
    problem: str = ""
    """Why what follows can't be read; then it has no place."""


def kind_of(file: BinaryIO, name: str) -> str:
    """Return the form of a file: by its suffix, and of ``.json`` by whether it begins with an array."""
    kind = KINDS[PurePosixPath(name).suffix.lower()]
    if kind == ARRAY:
        first = file.read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip(_SPACE)[:1]
        file.seek(0)
        kind = ARRAY if first == b"[" else JSONL
    return kind


def records_of(file: BinaryIO, kind: str, *, name: str) -> Iterator[TextRecord]:
    """Yield the records of a file; of CSV the header first, with the number 0.

    Raises:
        SourceInvalidError: If the header of a CSV file names a column twice.
    """
    if kind == JSONL:
        yield from _lines(file)
    elif kind == ARRAY:
        yield from _Array(file).elements()
    else:
        yield from _rows(file, name)


def parse(data: bytes, kind: str, *, name: str, number: int, header: bytes = b"", strict: bool = True) -> Any:
    """Read a record.

    Args:
        data: Its bytes.
        kind: Form of its file.
        name: Of the file: a ``.tsv`` is cut at tabs.
        number: Of the record, from 1.
        header: Of a CSV file.
        strict: Refuse an object that has a field twice.

    Raises:
        BadRecordError: If it is not of that form.
    """
    where = f"{UNITS[kind]} {number}"
    if kind == CSV:
        return _row(data, header, name, where)
    return parse_json(data if number > 1 else data.removeprefix(codecs.BOM_UTF8), where=where, strict=strict)


def parse_json(data: bytes, *, where: str, strict: bool = True) -> Any:
    """Read JSON.

    Raises:
        BadRecordError: If it is none, or an object has a field twice.
    """

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRecordError(f"{where}: the field {twice!r} is there twice, expected once", rule="json")
        return found

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique if strict else None)
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"{where} is not JSON: {error}", rule="json") from error


def _lines(file: BinaryIO) -> Iterator[TextRecord]:
    """Yield each line without its end; blank ones are no records."""
    position, number = 0, 0
    while line := file.readline(LINE_BYTES_MAX + 2):
        start, content, number = position, line.rstrip(b"\r\n"), number + 1
        position += len(line)
        if line.endswith(b"\n") or len(content) <= LINE_BYTES_MAX:
            if content.removeprefix(codecs.BOM_UTF8).strip():
                yield _record(number, start, content)
            continue
        digest = hashlib.sha256(line)
        while not line.endswith(b"\n") and (line := file.readline(LINE_BYTES_MAX)):
            digest.update(line)
            position += len(line)
        yield TextRecord(number=number, start=start, size=position - start, sha256=digest.hexdigest())


def _record(number: int, start: int, data: bytes) -> TextRecord:
    return TextRecord(number=number, start=start, size=len(data), sha256=hashlib.sha256(data).hexdigest(), data=data)


class _Array:
    """Cuts an array into its elements by brackets, commas and strings alone; each element is read later."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._data, self._base = b"", 0
        """Bytes of the file, and where the first of them lies."""
        self._begin = self._at = 0
        """Where in them an element begins, and how far they were looked at."""
        self._number = 0
        self._is_long = False

    def elements(self) -> Iterator[TextRecord]:
        """Yield each element, and a problem where the array can't be read further."""
        self._more()
        self._begin = self._at = len(self._data) - len(self._data.removeprefix(codecs.BOM_UTF8).lstrip(_SPACE)) + 1
        depth, text = 1, False
        while depth:
            found = (_INSIDE if text else _OUTSIDE).search(self._data, self._at)
            if found is None:
                self._at = max(self._at, len(self._data))
                if not self._more():
                    yield self._problem("is cut off: the array has no end")
                    return
                continue
            mark, self._at = found[0], found.end() + (found[0] == b"\\")
            text ^= mark == b'"'
            depth += (mark in b"[{") - (mark in b"]}")
            if depth == 0 or (depth == 1 and mark == b","):
                yield from self._element(found.start(), last=depth == 0)
        rest = self._data[self._begin :].strip(_SPACE)
        while not rest and (block := self._file.read(BLOCK_BYTES)):
            rest = block.strip(_SPACE)
        if rest:
            yield self._problem("follows the end of the array")

    def _element(self, end: int, *, last: bool) -> Iterator[TextRecord]:
        data = self._data[self._begin : end]
        start = self._base + self._begin + len(data) - len(data.lstrip(_SPACE))
        self._begin = end + 1
        if self._is_long:
            yield self._problem(f"is over {LINE_BYTES_MAX} bytes")
        elif data.strip(_SPACE) or not last:
            yield _record(self._number + 1, start, data.strip(_SPACE))
        elif self._number:
            yield self._problem("is missing after a comma")
        self._number += 1
        self._is_long = False

    def _more(self) -> bool:
        """Read on, and keep of what was read the element that has begun, unless it is too long."""
        if len(self._data) - self._begin > LINE_BYTES_MAX:
            self._is_long, self._begin = True, len(self._data)
        self._data, self._base = self._data[self._begin :], self._base + self._begin
        self._at, self._begin = self._at - self._begin, 0
        block = self._file.read(BLOCK_BYTES)
        self._data += block
        return bool(block)

    def _problem(self, what: str) -> TextRecord:
        number = self._number + 1
        return TextRecord(number=number, problem=f"{UNITS[ARRAY]} {number}, at byte {self._base + self._begin}, {what}")


class _Counted:
    """Lines of a CSV file as text, for the reader, which takes as many as a row has."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.taken: list[bytes] = []
        self.position = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(LINE_BYTES_MAX + 2):
            self.taken.append(line)
            text = line.removeprefix(codecs.BOM_UTF8) if not self.position else line
            self.position += len(line)
            if sum(map(len, self.taken)) > LINE_BYTES_MAX:
                raise csv.Error(f"it is over {LINE_BYTES_MAX} bytes; perhaps a quote is not closed")
            yield text.decode("utf-8", "surrogateescape")


def _rows(file: BinaryIO, name: str) -> Iterator[TextRecord]:
    csv.field_size_limit(LINE_BYTES_MAX)
    lines = _Counted(file)
    number, start = 0, 0
    try:
        for cells in csv.reader(lines, delimiter=_delimiter(name), strict=True):
            data = b"".join(lines.taken)
            if number == 0 and len(set(cells)) != len(cells):
                twice = next(cell for cell in cells if cells.count(cell) > 1)
                raise SourceInvalidError(
                    f"dataset file {name} has the column {twice!r} twice, expected once", field="source"
                )
            if cells:
                yield _record(number, start, data.rstrip(b"\r\n"))
                number += 1
            start = lines.position
            lines.taken.clear()
    except csv.Error as error:
        problem = f"{UNITS[CSV]} {number}, at byte {start}, can't be read, nor what follows: {error}"
        yield TextRecord(number=number, problem=problem)


def _row(data: bytes, header: bytes, name: str, where: str) -> dict[str, str | None]:
    try:
        texts = [part.decode("utf-8-sig" if part is header else "utf-8") for part in (header, data)]
    except UnicodeDecodeError as error:
        raise BadRecordError(f"{where}: text is not UTF-8 at byte {error.start}", rule="text") from error
    csv.field_size_limit(LINE_BYTES_MAX)
    names, cells = (next(csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(name))) for text in texts)
    if len(cells) != len(names):
        raise BadRecordError(f"{where}: {len(cells)} cells, expected {len(names)} as the header has", rule="fields")
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _delimiter(name: str) -> str:
    return "\t" if name.lower().endswith(".tsv") else ","
