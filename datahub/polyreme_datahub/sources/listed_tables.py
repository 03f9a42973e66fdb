"""Rows of listed tables: each is found again by its group and position, and checked against its digest."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO

from polyreme_datahub.errors import BadRecordError, SourceAwayError
from polyreme_datahub.sources.conversation_forms import record_of
from polyreme_datahub.sources.describe import Listed
from polyreme_datahub.sources.listing import Entry, Listing
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX, RECORD_BYTES_MAX, build_record
from polyreme_datahub.sources.tables import Columns, Row, Table, TableDamagedError, columns_of, open_table, row_of
from polyreme_datahub.sources.trees import Tree, changed
from polyreme_datahub.sources.types import RawRecord

if TYPE_CHECKING:
    import pyarrow


def list_rows(tree: Tree, path: str) -> Iterator[Listed]:
    """Yield an entry for each row of a table; one with a problem for rows that can't be read.

    Raises:
        SourceInvalidError: If its columns are not known.
        SourceAwayError: If it can't be read now.
    """
    try:
        file, etag = tree.open_found(path)
    except BadRecordError as error:
        yield Listed(entries=[Entry(record=0, path=path, problem=error.message, rule=error.rule)])
        return
    with file:
        try:
            table = open_table(file, path)
            yield from _rows(table, columns_of(table.schema, file=shown(path)), path, etag)
        except TableDamagedError as error:
            yield _damaged(Entry(record=0, path=path), error)
        except OSError as error:
            raise _away(path, error) from error


def _rows(table: Table, columns: Columns, path: str, etag: str) -> Iterator[Listed]:
    number = 0
    for group in table.groups():
        first = number
        try:
            for batch in table.batches(group, columns):
                for at in range(batch.num_rows):
                    entry = Entry(
                        record=0, path=path, member=f"row={number + 1}", etag=etag, group=group, row=number - first
                    )
                    yield _listed(batch, at, columns, entry)
                    number += 1
        except TableDamagedError as error:
            yield _damaged(Entry(record=0, path=path, member=f"row={number + 1}"), error)
            number += 1
        number = max(number, first + table.rows(group))


def _listed(batch: pyarrow.RecordBatch, at: int, columns: Columns, entry: Entry) -> Listed:
    where = _where(entry)
    try:
        row = row_of(batch, at, columns, where=where)
        for image in row.images:
            if len(image) > IMAGE_BYTES_MAX:
                raise BadRecordError(
                    f"{where}, {columns.image!r}: {len(image)} bytes, expected at most {IMAGE_BYTES_MAX}", rule="file"
                )
    except BadRecordError as error:
        return Listed(entries=[dataclasses.replace(entry, problem=error.message, rule=error.rule)])
    if row.size > RECORD_BYTES_MAX:
        problem = f"{where}: {row.size} bytes, expected at most {RECORD_BYTES_MAX}"
        return Listed(entries=[dataclasses.replace(entry, problem=problem, rule="file")])
    return Listed(
        entries=[dataclasses.replace(entry, size=row.size, sha256=row.digest(columns))], images=len(row.images)
    )


class ListedTables:
    """Rows of tables, in the order of files and of rows."""

    def __init__(self, tree: Tree, listing: Listing) -> None:
        self._tree, self._listing = tree, listing
        self._of_thread = threading.local()
        """Where each thread reads: work items are consecutive rows."""

    def record_id(self, ordinal: int) -> str:
        """Name a row by its file and number, from 1."""
        entry = self._listing.of(ordinal)[0]
        return "#".join(map(shown, filter(None, (entry.path, entry.member))))

    def read(self, ordinal: int) -> RawRecord:
        """Read a row."""
        entry, sample_id = self._listing.of(ordinal)[0], self.record_id(ordinal)
        if entry.problem:
            raise BadRecordError(entry.problem, rule=entry.rule, sample_id=sample_id)
        try:
            columns, row = self._cursor(entry).read(entry)
        except OSError as error:
            raise _away(entry.path, error) from error
        files = _Images({f"image {number}": image for number, image in enumerate(row.images)})
        record = record_of(columns.text, row.text, images=list(files.names), where=_where(entry))
        if row.id is not None:
            record["id"] = str(row.id)
        return build_record(record, files=files, default_id=sample_id)

    def _cursor(self, entry: Entry) -> _Cursor:
        cursor: _Cursor | None = getattr(self._of_thread, "cursor", None)
        if cursor is None or not cursor.can_read(entry):
            self._of_thread.cursor = None
            if cursor is not None:
                cursor.close()
            cursor = self._of_thread.cursor = _Cursor(self._tree, entry)
        return cursor


class _Cursor:
    """Reads the rows of one file, forward inside a group.

    Args:
        tree: Where the file lies.
        entry: Of the first row to read.
    """

    def __init__(self, tree: Tree, entry: Entry) -> None:
        self._path, self._etag = entry.path, entry.etag
        self._file = self._opened(tree, entry)
        self.close = weakref.finalize(self, self._file.close)
        """Closes the file; it is closed at the latest with the thread or the source, neither of which says its end."""
        try:
            self._table = open_table(self._file, entry.path)
        except TableDamagedError as error:
            raise changed(shown(entry.path), str(error)) from error
        self._columns = columns_of(self._table.schema, file=shown(entry.path))
        self._group, self._begins = -1, 0
        self._batch: pyarrow.RecordBatch | None = None
        self._batches: Iterator[pyarrow.RecordBatch] = iter(())

    def can_read(self, entry: Entry) -> bool:
        """Tell whether it has this row's file open."""
        return (entry.path, entry.etag) == (self._path, self._etag)

    def read(self, entry: Entry) -> tuple[Columns, Row]:
        """Return a row.

        Raises:
            SourceInvalidError: If it is not the one that was listed.
        """
        try:
            self._seek(entry)
            row = row_of(self._batch, entry.row - self._begins, self._columns, where=_where(entry))
        except (TableDamagedError, BadRecordError) as error:
            raise changed(_where(entry), str(error)) from error
        if row.digest(self._columns) != entry.sha256:
            raise changed(_where(entry), "its values are others")
        return self._columns, row

    def _seek(self, entry: Entry) -> None:
        if entry.group != self._group or entry.row < self._begins:
            self._group, self._begins, self._batch = entry.group, 0, None
            self._batches = self._table.batches(entry.group, self._columns)
        while self._batch is None or entry.row >= self._begins + self._batch.num_rows:
            self._begins += self._batch.num_rows if self._batch is not None else 0
            self._batch = next(self._batches, None)
            if self._batch is None:
                self._group = -1
                raise TableDamagedError("there is no such row")

    @staticmethod
    def _opened(tree: Tree, entry: Entry) -> BinaryIO:
        try:
            file, etag = tree.open_found(entry.path)
        except BadRecordError as error:
            raise changed(shown(entry.path), error.message) from error
        if etag != entry.etag:
            file.close()
            raise changed(shown(entry.path), f"its ETag is no longer {entry.etag}")
        return file


class _Images:
    """The images of a row, as files that its record names."""

    def __init__(self, names: Mapping[str, bytes]) -> None:
        self.names = names

    def size(self, name: str) -> int:
        """Return an image's size."""
        return len(self.names[name])

    def read(self, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:  # noqa: ARG002 - checked when listed
        """Return an image."""
        return self.names[name]


def _where(entry: Entry) -> str:
    return f"{shown(entry.path)}, {entry.member.replace('=', ' ')}" if entry.member else shown(entry.path)


def _damaged(entry: Entry, error: Exception) -> Listed:
    return Listed(entries=[dataclasses.replace(entry, problem=f"{_where(entry)}: {error}", rule="table")])


def _away(path: str, error: OSError) -> SourceAwayError:
    return SourceAwayError(f"file can't be read: {shown(path)}, {error.strerror}")
