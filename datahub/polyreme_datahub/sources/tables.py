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
from polyreme_datahub.sources.preference_forms import ANSWERS, preference_fields
from polyreme_datahub.sources.preference_forms import EXPECTED as PREFERENCE
from polyreme_datahub.sources.record_forms import EXPECTED, IMAGES, OWN, PAIRS, READ, text_fields
from polyreme_datahub.sources.records import PREFERENCE_RULES, RULES
from polyreme_datahub.sources.turn_forms import CONVERSATIONS

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
_CONTINUES = b"\xff\xff\xff\xff"


class TableDamagedError(Exception):
    """Rows that can't be read, and never could."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table that hold a record; others are not read."""

    fields: Sequence[str]
    """But for the images; the first is named in a digest even where it is alone."""
    image: str = ""
    unread: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """Those that are read."""
        return [*self.fields, *([self.image] if self.image else [])]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a row holds."""

    fields: Mapping[str, Any]
    """But for the images."""
    images: Sequence[bytes | str]
    """Bytes, or the name of a file."""

    @property
    def size(self) -> int:
        """Bytes, about."""
        values = [value for name, value in self.fields.items() if name != "id"]
        texts = (value if isinstance(value, str) else json.dumps(value, default=repr) for value in values)
        return sum(map(len, texts)) + sum(len(image) for image in self.images if isinstance(image, bytes))

    @property
    def digest(self) -> str:
        """Digest of its content, images included."""
        images = [digest_bytes(image) if isinstance(image, bytes) else [image] for image in self.images]
        content = {"id": None, **self.fields, "images": images}
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


def columns_of(schema: pyarrow.Schema, *, file: str, rules: int = RULES) -> Columns:
    """Find the columns that hold a record.

    Raises:
        SourceInvalidError: If there is no text, or a column has another type.
    """
    is_preference = rules >= PREFERENCE_RULES
    texts = preference_fields(schema.names) if is_preference else text_fields(schema.names, rules=rules)
    twice = [name for name in sorted(READ) if len(schema.get_all_field_indices(name)) > 1]
    images = [name for name in (IMAGES if rules > 1 else ("images", "image")) if name in schema.names]
    if twice or len(images) > 1:
        raise _refused(file, f"has two columns {' and '.join(map(repr, twice or images))}, expected one")
    if not texts:
        expected = PREFERENCE if is_preference else f"one of {EXPECTED}"
        raise _refused(file, f"has the columns {', '.join(schema.names)}, expected {expected}, and perhaps image(s)")
    read = (READ - {*IMAGES, "masks"}) if rules > 1 else {*texts, "id"}
    fields = [*texts, *(name for name in schema.names if name in read and name not in texts)]
    for name in (*fields, *images):
        if expected := _expected(name, schema.field(name).type):
            raise _refused(file, f"column {name!r} is {schema.field(name).type}, expected {expected}")
    unread = [name for name in schema.names if name not in {*fields, *images}]
    return Columns(fields=fields, image=images[0] if images else "", unread=unread)


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
    images = values.pop(columns.image, None)
    images = [] if images is None else images if isinstance(images, list) else [images]
    return Row(fields=values, images=[_image_of(image, f"{where}, {columns.image!r}") for image in images])


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
            if coded := [field.name for field in self.schema if pyarrow.types.is_dictionary(field.type)]:
                raise TableDamagedError(f"column {coded[0]!r} is a dictionary, which is read from Parquet only")
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


def _image_of(value: Any, where: str) -> bytes | str:
    """Return an image's bytes, or its name beside the table."""
    data = value.get("bytes") if isinstance(value, Mapping) else value
    path = value.get("path") if isinstance(value, Mapping) else None
    if isinstance(data, bytes | str):
        return data
    if not path:
        raise BadRecordError(
            f"{where}: nothing, expected the image's bytes, or its path beside the table", rule="image"
        )
    return str(path)


def _expected(name: str, kind: pyarrow.DataType) -> str:
    """Return what a column should hold; empty if it does."""
    import pyarrow

    types, value = pyarrow.types, _value_type(kind)
    if types.is_null(kind):
        return ""
    if name in CONVERSATIONS:
        lists = types.is_struct(kind) and all(_is_list(kind.field(at).type) for at in range(kind.num_fields))
        turns = _is_list(kind) and types.is_struct(_value_type(kind.value_type))
        return "" if turns or lists or _is_text(value) else "a list of turns, or JSON text of one"
    if name in IMAGES:
        return "" if _holds_images(kind) else f"binary, {_IMAGE_FORM}, string, or a list of one of them"
    if name == "id":
        number = types.is_integer(value) or types.is_floating(value)
        return "" if _is_text(value) or number else "string or integer"
    if name in OWN:
        return ""
    if name in ANSWERS and (_is_list(kind) or types.is_struct(kind)):
        return ""
    pair = name in {one for names in PAIRS for one in names} and _is_list(kind)
    return "" if pair or _is_text(value) else "string"


_IMAGE_FORM = "struct<bytes: binary, path: string>"


def _value_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return what a dictionary's keys stand for."""
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)
    )


def _is_list(kind: pyarrow.DataType) -> bool:
    import pyarrow

    types = pyarrow.types
    return any(
        matches(kind)
        for matches in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _holds_images(kind: pyarrow.DataType) -> bool:
    import pyarrow

    types, kind = pyarrow.types, _value_type(kind.value_type if _is_list(kind) else kind)
    if types.is_struct(kind):
        return any(kind.get_field_index(name) >= 0 for name in ("bytes", "path"))
    binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(binary or _is_text(kind) or types.is_null(kind))


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
