"""Rows of a sealed version: its samples, and where their files lie within the shards, so that nothing is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.results import insert_artifacts
from polyreme_datahub.registry.rows import SampleRow, columns


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """Samples of one shard."""

    samples: Sequence[SampleRow]
    artifacts: Sequence[Artifact]
    """Files of the samples."""


def put_sealed_rows(database: Database, version_id: int, shard: ShardRows, *, now_s: float) -> None:
    """Enter the samples of one shard; what is there already stays.

    Raises:
        BlobDeletingError: If garbage collection deletes a blob that holds one of the files.
    """

    def work(connection: Connection, shard: ShardRows) -> None:
        insert_artifacts(connection, shard.artifacts, now_s)
        rows = [{"version_id": version_id, **columns(row)} for row in shard.samples]
        insert_new(connection, schema.samples, rows)

    database.write(partial(work, shard=shard))
