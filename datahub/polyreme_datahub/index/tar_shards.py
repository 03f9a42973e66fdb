"""Writes samples into plain tar shards that WebDataset reads, each with a side index, and a Parquet manifest of all.

A sample is a key and some files (``jpg``, ``json``, ...), which follow each other in one shard: so one range of bytes
is one sample, and its sha256 is in the manifest. Nothing here depends on a model. Shards, side indexes and manifest lie
at the digest of their bytes, and the same samples give the same bytes: members have fixed times, owners and modes, and
Parquet is written with fixed options (another release of pyarrow may write other bytes).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.digests import canonical_json, digest_bytes
from polyreme_datahub.lakehouse import Lakehouse

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1
METADATA = b"polyreme"
"""Key of the manifest's own facts in the Parquet file's metadata."""
SHARD_BYTES_MAX = 64 * 2**20
"""A larger sample has a shard of its own."""
SAMPLES_MAX = 10_000_000
"""Samples of one manifest, which is built in memory."""
KEY_BYTES_MAX = 512
ROWS_MAX = 1 << 16
"""Rows of a row group."""
MODE = 0o644
COLUMNS: Mapping[str, type] = {"width": int, "height": int, "text_length": int}
"""Columns that every manifest has, where the caller names no others."""
_EXTENSION = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_END = bytes(2 * tarfile.BLOCKSIZE)
"""What ends an archive."""
_TYPES: Mapping[type, str] = {int: "int64", float: "float64", str: "string", bool: "bool_"}

Scalar = int | float | str | bool | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleFiles:
    """One sample."""

    key: str
    files: Mapping[str, bytes]
    """By extension, without the leading dot."""
    columns: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    """Further values of its row in the manifest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TarShard:
    """One stored shard."""

    digest: str
    size_bytes: int
    samples: int
    index: str
    """Digest of its side index: key, member, offset, length, sha256 of each file."""


def write_samples(
    lakehouse: Lakehouse,
    samples: Iterable[SampleFiles],
    *,
    columns: Mapping[str, type] = COLUMNS,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> str:
    """Store samples, whose keys must rise, and return the digest of their manifest.

    Args:
        lakehouse: Takes shards, side indexes and manifest.
        samples: By key; read once, at most one shard of them is held.
        columns: Names and types of the manifest's further columns; a sample without a value has null.
        shard_bytes_max: Size at which a shard is closed.

    Raises:
        InvalidConfigError: If a key, an extension or a column breaks a rule.
        StoreFailedError: If the store stays away.
    """
    rows = _Rows(columns)
    shard = ShardBuilder()
    previous = b""
    for sample in samples:
        key = _checked_key(sample.key, previous)
        previous = key
        members = members_of(sample)
        size_bytes = size_of(members)
        if shard.keys and shard.size_bytes + size_bytes > shard_bytes_max:
            rows.close(shard.store(lakehouse))
            shard = ShardBuilder()
        rows.add(sample, shard.add(sample.key, members))
    if shard.keys:
        rows.close(shard.store(lakehouse))
    return lakehouse.put_blob(rows.manifest())


def member_name(key: str, extension: str) -> str:
    """Name a file of a sample in its shard; what has a meaning to tar or WebDataset is escaped in the key."""
    return f"{quote(key, safe='').replace('.', '%2E')}.{extension}"


class ShardBuilder:
    """One shard as it is filled."""

    def __init__(self) -> None:
        self._archive = io.BytesIO()
        self._index: dict[str, list[Any]] = {name: [] for name in ("key", "member", "offset", "length", "sha256")}
        self.size_bytes = 0
        self.keys = 0

    def add(self, key: str, members: list[tuple[str, bytes, bytes]]) -> tuple[int, int, str]:
        """Append a sample's files; return offset, length and digest of all of them together."""
        begin = self.size_bytes
        seen = hashlib.sha256()
        for name, header, data in members:
            place = (key, name, self.size_bytes + len(header), len(data), digest_bytes(data))
            for column, value in zip(self._index.values(), place, strict=True):
                column.append(value)
            for part in (header, data, bytes(_padded(len(data)) - len(data))):
                seen.update(part)
                self._archive.write(part)
            self.size_bytes += len(header) + _padded(len(data))
        self.keys += 1
        return begin, self.size_bytes - begin, seen.hexdigest()

    def store_plain(self, lakehouse: Lakehouse) -> tuple[str, int]:
        """Store the shard alone; return its digest and size."""
        self._archive.write(_END)
        return lakehouse.put_blob(self._archive.getvalue()), self.size_bytes + len(_END)

    def store(self, lakehouse: Lakehouse) -> TarShard:
        """Store the shard, then its side index."""
        import pyarrow

        digest, size_bytes = self.store_plain(lakehouse)
        texts, numbers = pyarrow.string(), pyarrow.int64()
        types = {"key": texts, "member": texts, "offset": numbers, "length": numbers, "sha256": texts}
        sink = io.BytesIO()
        with parquet_writer(sink, pyarrow.schema(list(types.items()), metadata={"shard": digest})) as writer:
            writer.write_table(pyarrow.table(self._index, schema=pyarrow.schema(list(types.items()))))
        index = lakehouse.put_blob(sink.getvalue())
        return TarShard(digest=digest, size_bytes=size_bytes, samples=self.keys, index=index)


class _Rows:
    """The rows of a manifest, written group by group."""

    def __init__(self, columns: Mapping[str, type]) -> None:
        import pyarrow

        own = {"key": "string", "shard": "string", "offset": "int64", "length": "int64", "sha256": "string"}
        if wrong := [name for name, kind in columns.items() if name in own or kind not in _TYPES]:
            raise InvalidConfigError(
                f"no such columns of a manifest: {wrong}, expected other names than {sorted(own)}, of int, float, str "
                "or bool",
                field="columns",
            )
        self._columns = columns
        types = {**own, **{name: _TYPES[columns[name]] for name in sorted(columns)}}
        self._schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in types.items()])
        self._waiting: dict[str, list[Any]] = {name: [] for name in types}
        self._groups: list[pyarrow.Table] = []
        self._shards: list[TarShard] = []
        self._samples = 0

    def add(self, sample: SampleFiles, place: tuple[int, int, str]) -> None:
        """Add a sample's row; its shard is known once it is stored."""
        if unknown := sorted(set(sample.columns) - set(self._columns)):
            raise InvalidConfigError(
                f"sample {sample.key!r} has columns that the manifest has not: {unknown}", field="columns"
            )
        self._samples += 1
        if self._samples > SAMPLES_MAX:
            raise InvalidConfigError(f"too many samples for one manifest, at most {SAMPLES_MAX}", field="samples")
        for name, value in zip(("key", "offset", "length", "sha256"), (sample.key, *place), strict=True):
            self._waiting[name].append(value)
        for name in self._columns:
            self._waiting[name].append(sample.columns.get(name))

    def close(self, shard: TarShard) -> None:
        """Name the shard of the rows that wait for it."""
        import pyarrow

        self._shards.append(shard)
        self._waiting["shard"] = [shard.digest] * len(self._waiting["key"])
        try:
            self._groups.append(pyarrow.table(self._waiting, schema=self._schema))
        except (pyarrow.ArrowException, TypeError) as error:
            raise InvalidConfigError(
                f"a column holds another type than the manifest's: {error}", field="columns"
            ) from error
        self._waiting = {name: [] for name in self._waiting}

    def manifest(self) -> bytes:
        """Return the Parquet file."""
        import pyarrow

        facts = {"format": FORMAT, "samples": self._samples, "shards": [dataclasses.asdict(of) for of in self._shards]}
        schema = self._schema.with_metadata({METADATA: canonical_json(facts)})
        sink = io.BytesIO()
        with parquet_writer(sink, schema) as writer:
            table = pyarrow.concat_tables(self._groups) if self._groups else self._schema.empty_table()
            writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=ROWS_MAX)
        return sink.getvalue()


def parquet_writer(sink: io.BytesIO, schema: pyarrow.Schema) -> Any:
    """Write Parquet with nothing left to defaults that could change the bytes."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetWriter(
        sink, schema, version="2.6", compression="zstd", compression_level=3, use_dictionary=["shard"]
    )


def size_of(members: Iterable[tuple[str, bytes, bytes]]) -> int:
    """Bytes that a sample takes in a shard."""
    return sum(len(header) + _padded(len(data)) for _, header, data in members)


def members_of(sample: SampleFiles) -> list[tuple[str, bytes, bytes]]:
    """Return name, tar header and bytes of a sample's files, by extension."""
    if not sample.files:
        raise InvalidConfigError(f"sample {sample.key!r} has no files", field="files")
    members = []
    for extension, data in sorted(sample.files.items()):
        if not _EXTENSION.fullmatch(extension):
            raise InvalidConfigError(
                f"sample {sample.key!r} has a file {extension!r}, expected an extension such as jpg or 0.jpg",
                field="files",
            )
        info = tarfile.TarInfo(member_name(sample.key, extension))
        info.size, info.mode = len(data), MODE
        # ustar, unless a name is too long for it: then a PAX header without a time precedes the member.
        members.append((info.name, info.tobuf(tarfile.PAX_FORMAT), data))
    return members


def _checked_key(key: str, previous: bytes) -> bytes:
    value = key.encode()
    if not 0 < len(value) <= KEY_BYTES_MAX:
        raise InvalidConfigError(
            f"sample key is not valid: {key[:80]!r}, expected 1 to {KEY_BYTES_MAX} bytes", field="key"
        )
    if value <= previous:
        raise InvalidConfigError(
            f"sample keys must rise: {key!r} follows {previous.decode()!r}", field="the order of the samples"
        )
    return value


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
