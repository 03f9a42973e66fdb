"""Enters the samples of a sealed version in the registry, with the places of their files within the shards."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from polyreme_datahub.errors import DatasetNotFoundError
from polyreme_datahub.index.join_manifests import read_manifest
from polyreme_datahub.index.sample_bytes import RECORD_FILE
from polyreme_datahub.index.tar_shards import TarShard
from polyreme_datahub.lakehouse import Artifact, Lakehouse
from polyreme_datahub.recipes.recipe import Recipe, parse_recipe
from polyreme_datahub.registry import datasets, progress
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import SampleRow
from polyreme_datahub.registry.sealed_rows import ShardRows, put_sealed_rows
from polyreme_datahub.sources.samples import KIND


def recipe_of(version: DatasetVersion) -> Recipe | None:
    """Return the recipe that a version was made by, or None for a version that no recipe made.

    Raises:
        InvalidConfigError: If one of its operations can't be imported here.
    """
    content = version.source.get("recipe")
    return parse_recipe(content, is_stored=True) if version.source["kind"] == KIND and content is not None else None


def find_source(database: Database, version: DatasetVersion) -> DatasetVersion:
    """Return the version whose records the recipe of a sealed version ran on.

    Raises:
        DatasetNotFoundError: If it was deleted, or another one has its name now.
    """
    found = datasets.find_version(database, str(version.source["from"]))
    if found.digest != version.source["of"]:
        raise DatasetNotFoundError(f"the records of {version.reference} are gone: {found.reference} has others now")
    return found


def put_rows(database: Database, lakehouse: Lakehouse, version: DatasetVersion, *, now_s: Callable[[], float]) -> None:
    """Enter the samples of a sealed version, shard by shard; again, it changes nothing.

    Raises:
        IndexDamagedError: If the manifest or a side index does not fit its digest.
        ObjectNotFoundError: If one is missing.
    """
    if progress.count_samples(database, version.id) == version.records:
        return
    table, shards = read_manifest(lakehouse.get_blob(str(version.source["manifest"])))
    ids, keys = (table.column(name).to_pylist() for name in ("sample_id", "key"))
    first = 0
    for shard in shards:
        stop = first + shard.samples
        rows = _rows_of(lakehouse, shard, first, dict(zip(keys[first:stop], ids[first:stop], strict=True)))
        put_sealed_rows(database, version.id, rows, now_s=now_s())
        first = stop


def _rows_of(lakehouse: Lakehouse, shard: TarShard, first: int, ids: dict[str, str]) -> ShardRows:
    import pyarrow.parquet

    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in pyarrow.parquet.read_table(io.BytesIO(lakehouse.get_blob(shard.index))).to_pylist():
        files[row["key"]].append(row)
    samples, artifacts = [], {}
    for at, (key, sample_id) in enumerate(ids.items()):
        for row in files[key]:
            if row["member"].endswith(f".{RECORD_FILE}"):
                samples.append(SampleRow(ordinal=first + at, sample_id=sample_id, record=row["sha256"]))
            artifacts[row["sha256"]] = Artifact(
                digest=row["sha256"], blob=shard.digest, start=row["offset"], length=row["length"]
            )
    return ShardRows(samples=samples, artifacts=list(artifacts.values()))
