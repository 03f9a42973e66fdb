"""Joins the manifests of groups of tar shards into one; the shards stay where they are."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.index.tar_shards import FORMAT, METADATA, ROWS_MAX, TarShard, parquet_writer
from polyreme_datahub.lakehouse import Lakehouse

if TYPE_CHECKING:
    import pyarrow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinedManifest:
    """A stored manifest."""

    digest: str
    size_bytes: int
    """Of the manifest and of all shards that it names."""
    samples: int
    shards: tuple[TarShard, ...]


def read_manifest(data: bytes) -> tuple[pyarrow.Table, tuple[TarShard, ...]]:
    """Return the rows and the shards of a manifest."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(data))
    facts = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
    return table, tuple(TarShard(**shard) for shard in facts.get("shards", ()))


def join_manifests(lakehouse: Lakehouse, digests: Sequence[str]) -> JoinedManifest:
    """Store the manifest of all samples of some manifests, in their order; keys must rise across them.

    A column that only some of them have is null in the others; numbers of two kinds become floats, other kinds text.

    Args:
        lakehouse: Has the manifests, and takes the new one.
        digests: Digests of the manifests; at least one.

    Raises:
        IndexDamagedError: If a manifest does not fit its digest.
        ObjectNotFoundError: If one is missing.
    """
    import pyarrow

    tables: list[pyarrow.Table] = []
    shards: list[TarShard] = []
    for digest in digests:
        table, mine = read_manifest(lakehouse.get_blob(digest))
        tables.append(table.replace_schema_metadata(None))
        shards += mine
    types = _common_types([table.schema for table in tables])
    whole = pyarrow.concat_tables([_with_types(table, types) for table in tables])
    facts = {"format": FORMAT, "samples": whole.num_rows, "shards": [dataclasses.asdict(shard) for shard in shards]}
    schema = whole.schema.with_metadata({METADATA: canonical_json(facts)})
    sink = io.BytesIO()
    with parquet_writer(sink, schema) as writer:
        writer.write_table(whole.combine_chunks().replace_schema_metadata(schema.metadata), row_group_size=ROWS_MAX)
    data = sink.getvalue()
    return JoinedManifest(
        digest=lakehouse.put_blob(data),
        size_bytes=len(data) + sum(shard.size_bytes for shard in shards),
        samples=whole.num_rows,
        shards=tuple(shards),
    )


def _common_types(schemas: Sequence[pyarrow.Schema]) -> dict[str, Any]:
    """Return one type for each column: those of every manifest first, the others by name."""
    import pyarrow

    kinds: dict[str, set[Any]] = {}
    for schema in schemas:
        for field in schema:
            kinds.setdefault(field.name, set()).add(field.type)
    numbers = {pyarrow.int64(), pyarrow.float64()}

    def one(found: set[Any]) -> Any:
        if len(found) == 1:
            return next(iter(found))
        return pyarrow.float64() if found <= numbers else pyarrow.string()

    first = schemas[0].names[:5]
    return {name: one(kinds[name]) for name in [*first, *sorted(set(kinds) - set(first))]}


def _with_types(table: pyarrow.Table, types: dict[str, Any]) -> pyarrow.Table:
    import pyarrow

    columns = {
        name: table.column(name).cast(kind) if name in table.column_names else pyarrow.nulls(table.num_rows, kind)
        for name, kind in types.items()
    }
    return pyarrow.table(columns, schema=pyarrow.schema(list(types.items())))
