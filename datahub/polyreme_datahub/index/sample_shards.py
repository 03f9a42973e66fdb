"""Reads samples out of tar shards by their manifest: one range read each, checked against its sha256."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.tar_shards import FORMAT, METADATA, TarShard, member_name
from polyreme_datahub.lakehouse import Artifact, Lakehouse

_PLACES = ("key", "shard", "offset", "length", "sha256")


class SampleShards:
    """The samples of one manifest, by their position in it.

    Args:
        store: Where shards and manifest lie.
        manifest_digest: As ``write_samples`` returned it.

    Raises:
        IndexDamagedError: If the manifest is missing, damaged or of another format.
    """

    def __init__(self, store: ObjectStore, manifest_digest: str) -> None:
        import pyarrow.parquet

        self._lakehouse = Lakehouse(store)
        self.digest = manifest_digest
        try:
            data = self._lakehouse.get_blob(manifest_digest)
        except ObjectNotFoundError as error:
            raise IndexDamagedError(f"stored data is missing: manifest {blob_key(manifest_digest)}") from error
        table = pyarrow.parquet.read_table(io.BytesIO(data))
        facts = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
        if facts.get("format") != FORMAT:
            raise IndexDamagedError(
                f"manifest {blob_key(manifest_digest)} has format {facts.get('format')}, expected {FORMAT}"
            )
        self.shards = tuple(TarShard(**shard) for shard in facts["shards"])
        self.table = table
        """Every row: the places of the samples, and their further columns."""

    def __len__(self) -> int:
        """Count of samples."""
        return int(self.table.num_rows)

    def key(self, position: int) -> str:
        """Return a sample's key."""
        return str(self._row(position)["key"])

    def read(self, position: int) -> dict[str, bytes]:
        """Return a sample's files by extension.

        Raises:
            IndexDamagedError: Naming the sample, if its bytes are missing or were changed.
        """
        return next(self.read_many([position]))[1]

    def read_many(self, positions: Sequence[int]) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield position and files of some samples, in the order in which they lie; neighbours cost one request.

        Raises:
            IndexDamagedError: Naming a sample, if bytes are missing or were changed.
        """
        rows = {position: self._row(position) for position in positions}
        places = {str(row["sha256"]): position for position, row in rows.items()}
        artifacts = [
            Artifact(digest=row["sha256"], blob=row["shard"], start=row["offset"], length=row["length"])
            for row in rows.values()
        ]
        try:
            for digest, data in self._lakehouse.read_parts(artifacts):
                position = places[digest]
                yield position, _files(data, str(rows[position]["key"]))
        except IndexDamagedError as error:
            raise IndexDamagedError(f"{error.message}; {self._named(error.message, rows)}") from error
        except ObjectNotFoundError as error:
            raise IndexDamagedError(f"stored data is missing: {error.message}; {self._named('', rows)}") from error

    def _named(self, message: str, rows: dict[int, dict[str, Any]]) -> str:
        """Name the sample that an error is about, or the first of those that were asked for."""
        hit = [at for at, row in rows.items() if row["sha256"] in message] or list(rows)
        return f"sample {rows[hit[0]]['key']!r} of manifest {self.digest}"

    def _row(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"no sample {position}: the manifest has {len(self)}")
        return {name: self.table.column(name)[position].as_py() for name in _PLACES}


def _files(data: bytes, key: str) -> dict[str, bytes]:
    """Cut a sample's files out of its range, which is an archive but for its end."""
    begin = len(member_name(key, ""))
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data + bytes(2 * tarfile.BLOCKSIZE)), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None, "a shard holds regular files only"
            files[member.name[begin:]] = file.read()
    return files
