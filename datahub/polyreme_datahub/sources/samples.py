"""Samples of the sample store: a sealed version, read as any other source is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polyreme_api.store import ObjectStore
from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.sample_bytes import RECORD_FILE
from polyreme_datahub.index.sample_shards import SampleShards
from polyreme_datahub.sources.types import RawRecord

KIND = "samples"


class SamplesSource:
    """Samples of one manifest, by their position in it; each is one range read, checked against its digest.

    Args:
        description: Names the manifest.
        store: Where manifest and shards lie.
    """

    def __init__(self, description: Mapping[str, Any], store: ObjectStore) -> None:
        self._shards = SampleShards(store, str(description["manifest"]))

    def record_id(self, ordinal: int) -> str:
        """Return a sample's id."""
        return str(self._shards.table.column("sample_id")[ordinal].as_py())

    def read(self, ordinal: int) -> RawRecord:
        """Read a sample's record and images.

        Raises:
            BadRecordError: If there is no such sample.
            IndexDamagedError: If its bytes are missing or were changed.
        """
        if not 0 <= ordinal < len(self._shards):
            raise BadRecordError(f"no sample {ordinal}: the version has {len(self._shards)}", rule="ordinal")
        files = dict(self._shards.read(ordinal))
        content = json.loads(files.pop(RECORD_FILE))
        by_digest = {digest_bytes(data): data for data in files.values()}
        named = [*content.get("images", ()), *(mask for mask in content.get("masks", ()) if mask is not None)]
        return RawRecord(
            sample_id=str(content["id"]),
            content=content,
            blobs=[by_digest[digest] for digest in dict.fromkeys(named) if digest in by_digest],
        )
