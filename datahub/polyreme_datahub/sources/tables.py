"""Rows of Parquet files and of Arrow streams, as Hugging Face's ``datasets`` writes them.

A row group of Parquet is read by batches of a few rows. A batch of an Arrow stream is one block of bytes, and is read
as a whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.sources.conversation_forms import CONVERSATIONS, FIELDS, text_field

if TYPE_CHECKING:
    import pyarrow

BATCH_BYTES = 8 * 2**20
"""Rows of Parquet that are decoded at once, about."""
BATCH_ROWS_MAX = 256
READ_BYTES = 2 * 2**20
"""Bytes of a column that are read from a file at once."""
STREAM_BATCH_BYTES_MAX = 2**30
"""Of a batch in an Arrow stream."""
HEADER_BYTES_MAX = 16 * 2**20
IMAGE_COLUMNS = ("images", "image")
_CONTINUES = b"\xff\xff\xff\xff"


class TableDamagedError(Exception):
    """Rows that can't be read, and never could."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table that hold a record; others are not read."""

    text: str
    image: str = ""
    id: str = ""

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return [name for name in (self.id, self.text, self.image) if name]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a row holds."""

    text: Any
    images: Sequence[bytes]
    id: Any = None

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.text if isinstance(self.text, str) else json.dumps(self.text, default=repr)) + sum(
            map(len, self.images)
        )

    def digest(self, columns: Columns) -> str:
        """Digest of its content, images included."""
        content = {columns.text: self.text, "id": self.id, "images": [digest_bytes(image) for image in self.images]}
        return hashlib.sha256(json.dumps(content, default=repr, sort_keys=True).encode()).hexdigest()


class Table(Protocol):
    """A file of rows."""

    @property
    def schema(self) -> pyarrow.Schema:
        """Its columns."""
        ...

    def groups(self) -> Iterator[int]:
        """Yield the name of each group, in order.

        Raises:
            TableDamagedError: If what follows can't be read.
        """
        ...

    def rows(self, group: int) -> int:
        """Return the number of rows of a group; 0 if only its batches say that."""
        ...

    def batches(self, group: int, columns: Columns) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of a group, a few at once.

        Raises:
            TableDamagedError: If what follows can't be read.
        """
        ...


def columns_of(schema: pyarrow.Schema, *, file: str) -> Columns:
    """Find the columns that hold a record.

    Raises:
        SourceInvalidError: If there is no text, or a column has another type.
    """
    import pyarrow

    twice = [name for name in (*FIELDS, *IMAGE_COLUMNS, "id") if len(schema.get_all_field_indices(name)) > 1]
    images = [name for name in IMAGE_COLUMNS if name in schema.names]
    text = text_field(schema.names)
    if twice or len(images) > 1:
        raise _refused(file, f"has two columns {' and '.join(map(repr, twice or images))}, expected one")
    if not text:
        raise _refused(
            file, f"has the columns {', '.join(schema.names)}, expected one of {', '.join(FIELDS)} and perhaps image(s)"
        )
    kind, types = schema.field(text).type, pyarrow.types
    if text in CONVERSATIONS:
        if not (_is_list(kind) and types.is_struct(kind.value_type)):
            raise _refused(file, f"column {text!r} is {kind}, expected a list of turns")
    elif not _is_text(kind):
        raise _refused(file, f"column {text!r} is {kind}, expected string")
    image = images[0] if images else ""
    if image and not _holds_bytes(schema.field(image).type):
        raise _refused(
            file,
            f"column {image!r} is {schema.field(image).type}, expected binary, struct<bytes: binary, path: string>, or "
            "a list of one of them",
        )
    name = "id" if "id" in schema.names else ""
    if name and not (_is_text(schema.field(name).type) or types.is_integer(schema.field(name).type)):
        raise _refused(file, f"column 'id' is {schema.field(name).type}, expected string or integer")
    return Columns(text=text, image=image, id=name)


def row_of(batch: pyarrow.RecordBatch, at: int, columns: Columns, *, where: str) -> Row:
    """Return a row of a batch.

    Raises:
        BadRecordError: If a value can't be read.
    """
    values = {}
    for name in columns.names:
        try:
            values[name] = batch.column(name)[at].as_py()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"{where}, {name!r}: text is not UTF-8 at byte {error.start}", rule="text") from error
    images = values.get(columns.image)
    if images is None:
        images = []
    images = images if isinstance(images, list) else [images]
    return Row(
        text=values[columns.text],
        images=[_bytes_of(image, f"{where}, {columns.image!r}") for image in images],
        id=values.get(columns.id),
    )


def open_table(file: BinaryIO, name: str) -> Table:
    """Open a file of rows.

    Raises:
        TableDamagedError: If it is none.
    """
    return _Parquet(file) if name.lower().endswith(".parquet") else _Stream(file)


class _Parquet:
    def __init__(self, file: BinaryIO) -> None:
        import pyarrow
        import pyarrow.parquet

        self._errors = (pyarrow.ArrowException, OSError, ValueError)
        try:
            self._file = pyarrow.parquet.ParquetFile(
                getattr(file, "raw", file), buffer_size=READ_BYTES, pre_buffer=False
            )
            self.schema = _decoded(self._file.schema_arrow)
        except self._errors as error:
            raise _damaged(error, "it is not Parquet, or cut off") from error

    def groups(self) -> Iterator[int]:
        yield from range(self._file.metadata.num_row_groups)

    def rows(self, group: int) -> int:
        return int(self._file.metadata.row_group(group).num_rows)

    def batches(self, group: int, columns: Columns) -> Iterator[pyarrow.RecordBatch]:
        try:
            about = self._file.metadata.row_group(group)
            each = max(1, about.total_byte_size // max(1, about.num_rows))
            rows = max(1, min(BATCH_ROWS_MAX, BATCH_BYTES // each))
            yield from self._file.iter_batches(rows, row_groups=[group], columns=columns.names, use_threads=False)
        except self._errors as error:
            raise _damaged(error, f"row group {group} can't be read") from error


class _Stream:
    """An Arrow stream: messages one after the other, each a header with its length, and a body."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow
        import pyarrow.ipc

        self._file = file
        self._errors = (pyarrow.ArrowException, OSError, ValueError, struct.error, IndexError)
        try:
            first = self._message(0)
            if first is None:
                raise TableDamagedError("it holds no message")
            self._first, self.schema = len(first), _decoded(pyarrow.ipc.read_schema(pyarrow.py_buffer(first)))
        except self._errors as error:
            raise _damaged(error, "it is not an Arrow stream, as datasets' save_to_disk writes one") from error

    def groups(self) -> Iterator[int]:
        at, size = self._first, self._file.seek(0, os.SEEK_END)
        while (length := self._length(at)) is not None:
            if at + length > size:
                raise TableDamagedError(
                    f"the batch at byte {at} has {length} bytes, {size - at} are there: it is cut off"
                )
            yield at
            at += length

    def rows(self, group: int) -> int:  # noqa: ARG002 - as the other
        return 0

    def batches(self, group: int, columns: Columns) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow
        import pyarrow.ipc

        try:
            data = self._message(group)
            if data is None:
                raise TableDamagedError(f"there is no batch at byte {group}")
            batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(pyarrow.py_buffer(data)), self.schema)
            batch = batch.select(columns.names)
            batch.validate(full=True)
            yield batch
        except self._errors as error:
            raise _damaged(error, f"the batch at byte {group} can't be read") from error

    def _message(self, at: int) -> bytes | None:
        length = self._length(at)
        if length is None:
            return None
        self._file.seek(at)
        data = self._file.read(length)
        if len(data) != length:
            raise TableDamagedError(
                f"the message at byte {at} has {length} bytes, {len(data)} are there: it is cut off"
            )
        return data

    def _length(self, at: int) -> int | None:
        """Return the bytes of a message, header included; None at the end mark."""
        self._file.seek(at)
        head = self._file.read(8)
        if len(head) < 8 or head[:4] != _CONTINUES:
            raise TableDamagedError(f"there is no message at byte {at}: it is cut off, or not an Arrow stream")
        size = int.from_bytes(head[4:], "little")
        if not size:
            return None
        if size > HEADER_BYTES_MAX:
            raise TableDamagedError(f"the header at byte {at} has {size} bytes, expected at most {HEADER_BYTES_MAX}")
        body = _body_bytes(self._file.read(size), at)
        if not 0 <= body <= STREAM_BATCH_BYTES_MAX:
            raise TableDamagedError(
                f"the batch at byte {at} has {body} bytes, expected at most {STREAM_BATCH_BYTES_MAX}"
            )
        return 8 + size + body


def _body_bytes(header: bytes, at: int) -> int:
    """Read the length of a message's body from its header (a flatbuffer: field 3 of the table ``Message``)."""
    try:
        (root,) = struct.unpack_from("<I", header, 0)
        (back,) = struct.unpack_from("<i", header, root)
        (size,) = struct.unpack_from("<H", header, root - back)
        field = struct.unpack_from("<H", header, root - back + 10)[0] if size > 10 else 0
        return int(struct.unpack_from("<q", header, root + field)[0]) if field else 0
    except struct.error as error:
        raise TableDamagedError(f"the header at byte {at} can't be read: {error}") from error


def _bytes_of(value: Any, where: str) -> bytes:
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if isinstance(data, bytes):
        return data
    path = value.get("path") if isinstance(value, Mapping) else None
    seen = f"no bytes, only the path {path!r}" if path else "nothing"
    raise BadRecordError(f"{where}: {seen}, expected the image's bytes; embed the images in the table", rule="image")


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _is_list(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    )


def _holds_bytes(kind: pyarrow.DataType) -> bool:
    import pyarrow

    kind = kind.value_type if _is_list(kind) else kind
    if pyarrow.types.is_struct(kind):
        if kind.get_field_index("bytes") < 0:
            return False
        kind = kind.field("bytes").type
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def _decoded(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return a schema whose names are text.

    Raises:
        ValueError: If one is not UTF-8; pyarrow finds out only when it is read.
    """
    for name in schema.names:
        name.encode()
    return schema


def _refused(file: str, reason: str) -> SourceInvalidError:
    return SourceInvalidError(f"dataset file {file} {reason}", field="source")


def _damaged(error: Exception, what: str) -> Exception:
    """Return the error of rows that can't be read, unless the file itself could not be."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return TableDamagedError(f"{what}: {error}")
