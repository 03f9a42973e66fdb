"""Rows of listed tables: each is found again by its group and position, and checked against its digest."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO

from polyreme_datahub.errors import BadRecordError, SourceAwayError, SourceInvalidError
from polyreme_datahub.sources.describe import Listed
from polyreme_datahub.sources.listed import ListedFiles
from polyreme_datahub.sources.listing import Entry, Listing
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.record_forms import Part
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX, PREFERENCE_RULES, RECORD_BYTES_MAX, RULES, Files
from polyreme_datahub.sources.tables import Columns, Row, Table, TableDamagedError, columns_of, open_table, row_of
from polyreme_datahub.sources.trees import Tree, changed
from polyreme_datahub.sources.types import Looked, RawRecord

if TYPE_CHECKING:
    import pyarrow


def has_preference_columns(tree: Tree, path: str) -> bool:
    """Tell whether the columns of a table are those of preferences; of one that can't be read they are not."""
    try:
        file, _ = tree.open_found(path)
        with file:
            columns_of(open_table(file, path).schema, file=shown(path), rules=PREFERENCE_RULES)
    except (BadRecordError, SourceInvalidError, TableDamagedError, OSError):
        return False
    return True


def list_rows(tree: Tree, path: str, *, rules: int = RULES) -> Iterator[Listed]:
    """Yield an entry for each row of a table; one with a problem for rows that can't be read.

    Args:
        tree: Where it lies.
        path: Its name there.
        rules: Of its records.

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
            columns = columns_of(table.schema, file=shown(path), rules=rules)
            for listed in _rows(table, columns, path, etag):
                yield dataclasses.replace(listed, entries=[*listed.entries, *_files_of(tree, path, listed)])
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
            if isinstance(image, bytes) and len(image) > IMAGE_BYTES_MAX:
                raise BadRecordError(
                    f"{where}, {columns.image!r}: {len(image)} bytes, expected at most {IMAGE_BYTES_MAX}", rule="file"
                )
    except BadRecordError as error:
        return Listed(entries=[dataclasses.replace(entry, problem=error.message, rule=error.rule)])
    if row.size > RECORD_BYTES_MAX:
        problem = f"{where}: {row.size} bytes, expected at most {RECORD_BYTES_MAX}"
        return Listed(entries=[dataclasses.replace(entry, problem=problem, rule="file")])
    names = [image for image in row.images if isinstance(image, str)]
    listed = dataclasses.replace(entry, size=row.size, sha256=row.digest)
    return Listed(entries=[listed], images=len(row.images) - len(names), files=names)


def _files_of(tree: Tree, path: str, listed: Listed) -> Iterator[Entry]:
    """Yield the entries of the files that a row names, beside its table."""
    for name in dict.fromkeys(listed.files):
        look = tree.look(_beside(path, name), bytes_max=IMAGE_BYTES_MAX)
        yield Entry(record=0, path=_beside(path, name), **dataclasses.asdict(look))


def _beside(path: str, name: str) -> str:
    return f"{path.rpartition('/')[0]}/{name}".removeprefix("/") if name and not name.startswith("/") else name


class ListedTables:
    """Rows of tables, in the order of files and of rows."""

    def __init__(self, tree: Tree, listing: Listing, rules: int) -> None:
        self._tree, self._listing, self._rules = tree, listing, rules
        self._of_thread = threading.local()
        """Where each thread reads: work items are consecutive rows."""

    def record_id(self, ordinal: int) -> str:
        """Name a row by its file and number, from 1."""
        entry = self._listing.of(ordinal)[0]
        return "#".join(map(shown, filter(None, (entry.path, entry.member))))

    def read(self, ordinal: int) -> RawRecord:
        """Read a row."""
        return self._part(ordinal).read()

    def look(self, ordinal: int) -> Looked:
        """Understand a row."""
        part, cursor = self._part(ordinal), self._of_thread.cursor
        looked = part.look()
        return dataclasses.replace(looked, unread=[*looked.unread, *cursor.columns.unread])

    def _part(self, ordinal: int) -> Part:
        (entry, *listed), sample_id = self._listing.of(ordinal), self.record_id(ordinal)
        if entry.problem:
            raise BadRecordError(entry.problem, rule=entry.rule, sample_id=sample_id)
        cursor = self._cursor(entry)
        try:
            row = cursor.read(entry)
        except OSError as error:
            raise _away(entry.path, error) from error
        names = [
            _beside(entry.path, image) if isinstance(image, str) else f"image {number}"
            for number, image in enumerate(row.images)
        ]
        held = {name: image for name, image in zip(names, row.images, strict=True) if isinstance(image, bytes)}
        files = ListedFiles(self._tree, {one.path: one for one in listed})
        null = {cursor.columns.image: None} if cursor.columns.image and not names else {}
        return Part(
            fields={**row.fields, **null},
            files=_Images(held, files),
            default_id=sample_id,
            where=_where(entry),
            images=names,
            rules=self._rules,
        )

    def _cursor(self, entry: Entry) -> _Cursor:
        cursor: _Cursor | None = getattr(self._of_thread, "cursor", None)
        if cursor is None or not cursor.can_read(entry):
            self._of_thread.cursor = None
            if cursor is not None:
                cursor.close()
            cursor = self._of_thread.cursor = _Cursor(self._tree, entry, self._rules)
        return cursor


class _Cursor:
    """Reads the rows of one file, forward inside a group.

    Args:
        tree: Where the file lies.
        entry: Of the first row to read.
        rules: Of records, under which it was registered.
    """

    def __init__(self, tree: Tree, entry: Entry, rules: int) -> None:
        self._path, self._etag = entry.path, entry.etag
        self._file = self._opened(tree, entry)
        self.close = weakref.finalize(self, self._file.close)
        """Closes the file; it is closed at the latest with the thread or the source, and neither reports its end."""
        try:
            self._table = open_table(self._file, entry.path)
        except TableDamagedError as error:
            raise changed(shown(entry.path), str(error)) from error
        self.columns = columns_of(self._table.schema, file=shown(entry.path), rules=rules)
        self._group, self._begins = -1, 0
        self._batch: pyarrow.RecordBatch | None = None
        self._batches: Iterator[pyarrow.RecordBatch] = iter(())

    def can_read(self, entry: Entry) -> bool:
        """Tell whether it has this row's file open."""
        return (entry.path, entry.etag) == (self._path, self._etag)

    def read(self, entry: Entry) -> Row:
        """Return a row.

        Raises:
            SourceInvalidError: If it is not the one that was listed.
        """
        try:
            self._seek(entry)
            row = row_of(self._batch, entry.row - self._begins, self.columns, where=_where(entry))
        except (TableDamagedError, BadRecordError) as error:
            raise changed(_where(entry), str(error)) from error
        if row.digest != entry.sha256:
            raise changed(_where(entry), "its values are others")
        return row

    def _seek(self, entry: Entry) -> None:
        if entry.group != self._group or entry.row < self._begins:
            self._group, self._begins, self._batch = entry.group, 0, None
            self._batches = self._table.batches(entry.group, self.columns)
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
    """The images of a row, as files that its record names: bytes of the row, or files beside the table."""

    def __init__(self, held: Mapping[str, bytes], files: Files) -> None:
        self._held, self._files = held, files

    def size(self, name: str) -> int:
        """Return an image's size."""
        return len(self._held[name]) if name in self._held else self._files.size(name)

    def read(self, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:
        """Return an image."""
        return self._held[name] if name in self._held else self._files.read(name, bytes_max=bytes_max)


def _where(entry: Entry) -> str:
    return f"{shown(entry.path)}, {entry.member.replace('=', ' ')}" if entry.member else shown(entry.path)


def _damaged(entry: Entry, error: Exception) -> Listed:
    return Listed(entries=[dataclasses.replace(entry, problem=f"{_where(entry)}: {error}", rule="table")])


def _away(path: str, error: OSError) -> SourceAwayError:
    return SourceAwayError(f"file can't be read: {shown(path)}, {error.strerror}")
