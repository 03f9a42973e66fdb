"""The listing of a version: every file of every record with its size and digest, as one Parquet blob of the lakehouse.

It is written once, streamed, when the version is registered, and read by row groups: neither holds all of it in memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import io
import json
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self

from polyreme_datahub.errors import IndexDamagedError

if TYPE_CHECKING:
    import pyarrow

GROUP_ROWS = 8192
"""Rows of one row group, about: a record is never in two."""
GROUPS_KEPT = 4
CHECK_BYTES = 8 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of one record, or one line."""

    record: int
    path: str
    """Relative to the dataset's root."""
    start: int = -1
    """First byte of the record's own line; -1 for a whole file."""
    size: int = 0
    sha256: str = ""
    """Digest of the bytes; empty where they were not read, as in a bucket."""
    etag: str = ""
    """Of an object in a bucket."""
    page: int = -1
    """Page of a document, from 0."""
    problem: str = ""
    """Why the file can't be read: the record becomes a dead letter with this sentence."""
    rule: str = ""
    """Of the dead letter."""
    member: str = ""
    """Name inside the file: of a member of a tar shard, or ``row=N`` of a table."""
    group: int = -1
    """Of a table's row: its row group, or the first byte of its batch."""
    row: int = -1
    """Of a table's row: its position in the group, from 0."""

    @property
    def is_part(self) -> bool:
        """Whether it is a range of a file's bytes: a line, or a member of a shard."""
        return self.start >= 0

    @property
    def is_line(self) -> bool:
        """Whether it is a record's own line."""
        return self.is_part and not self.member

    @property
    def identity(self) -> list[Any]:
        """What a version's digest is made of: what is read, and under which name, but not where it lies."""
        content = self.problem or self.sha256 or f"{self.size}:{self.etag}"
        named = [self.member] if self.member else []
        return [self.record, "" if self.is_line else self.path, self.page, self.rule, content, *named]


class ListingWriter:
    """Writes a listing into a temporary file, in the order of records; use it as a context."""

    def __init__(self) -> None:
        import pyarrow
        import pyarrow.parquet

        numbers = {"record", "start", "size", "group", "row"}
        kinds = {name: pyarrow.int64() if name in numbers else pyarrow.binary() for name in _fields()}
        self._schema = pyarrow.schema(list({**kinds, "page": pyarrow.int32()}.items()))
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._writer = pyarrow.parquet.ParquetWriter(
            self._file, self._schema, compression="zstd", write_page_checksum=True, write_statistics=["record"]
        )
        self._rows: list[Entry] = []
        self._content = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer.is_open:
            self._writer.close()
        self._file.close()

    def add(self, entry: Entry) -> None:
        """Add an entry: of the same record as the last one, or of the next."""
        if len(self._rows) >= GROUP_ROWS and entry.record != self._rows[-1].record:
            self._flush()
        self._rows.append(entry)
        self._content.update(json.dumps(entry.identity).encode() + b"\n")

    def finish(self) -> BinaryIO:
        """Return the whole file, to be read from its start."""
        if self._rows:
            self._flush()
        self._writer.close()
        self._file.seek(0)
        return self._file

    @property
    def content(self) -> str:
        """Digest of what the listed files hold."""
        return self._content.hexdigest()

    def _flush(self) -> None:
        import pyarrow

        columns = {name: [_stored(name, getattr(row, name)) for row in self._rows] for name in _fields()}
        self._writer.write_table(pyarrow.table(columns, schema=self._schema), row_group_size=len(self._rows))
        self._rows.clear()


class ReadRange(Protocol):
    """Reads a range of bytes of one object."""

    def __call__(self, *, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, fewer only at the end."""
        ...


class RangeFile(io.RawIOBase):
    """A file over range reads.

    Args:
        read_range: Reads the bytes.
        size: Of the object.
    """

    def __init__(self, read_range: ReadRange, size: int) -> None:
        super().__init__()
        self._read_range, self._size, self._at = read_range, size, 0

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer: one range."""
        length = max(0, min(len(buffer), self._size - self._at))
        data = self._read_range(start=self._at, length=length) if length else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class Listing:
    """A stored listing; threads may share it.

    Args:
        read_range: Reads the blob.
        size: Of the blob [bytes].
        name: Digest of the blob: all of it is checked once, block by block, and each page again when it is read.

    Raises:
        IndexDamagedError: If it can't be read.
    """

    def __init__(self, read_range: ReadRange, size: int, *, name: str) -> None:
        import pyarrow
        import pyarrow.parquet

        self._name = name
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Mapping[int, list[Entry]]] = OrderedDict()
        self._check(read_range, size)
        try:
            self._file = pyarrow.parquet.ParquetFile(
                RangeFile(read_range, size), page_checksum_verification=True, pre_buffer=False
            )
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from error
        groups = range(self._file.metadata.num_row_groups)
        self._firsts = [int(self._file.metadata.row_group(at).column(0).statistics.min) for at in groups]

    def of(self, record: int) -> list[Entry]:
        """Return the entries of a record.

        Raises:
            IndexDamagedError: If the blob is damaged.
        """
        group = bisect.bisect_right(self._firsts, record) - 1
        with self._lock:
            if group not in self._kept:
                while len(self._kept) >= GROUPS_KEPT:
                    self._kept.popitem(last=False)
                self._kept[group] = self._read(group)
            self._kept.move_to_end(group)
            return self._kept[group][record]

    def _read(self, group: int) -> Mapping[int, list[Entry]]:
        import pyarrow

        try:
            table: pyarrow.Table = self._file.read_row_group(group, use_threads=False)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from error
        rows: dict[int, list[Entry]] = {}
        names = [name for name in _fields() if name in table.column_names]  # an older release wrote fewer
        columns = [table.column(name).to_pylist() for name in names]
        for values in zip(*columns, strict=True):
            entry = Entry(**{name: _loaded(name, value) for name, value in zip(names, values, strict=True)})
            rows.setdefault(entry.record, []).append(entry)
        return rows

    def _check(self, read_range: ReadRange, size: int) -> None:
        digest = hashlib.sha256()
        for start in range(0, size, CHECK_BYTES):
            digest.update(read_range(start=start, length=min(CHECK_BYTES, size - start)))
        if digest.hexdigest() != self._name:
            raise self._damaged(ValueError(f"its bytes have digest {digest.hexdigest()}"))

    def _damaged(self, error: Exception) -> IndexDamagedError:
        return IndexDamagedError(f"stored data is damaged: the listing {self._name} can't be read: {error}")


def _fields() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Entry))


def _stored(name: str, value: Any) -> Any:
    if name == "sha256":
        return bytes.fromhex(value)
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _loaded(name: str, value: Any) -> Any:
    if name == "sha256":
        return value.hex()
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value
