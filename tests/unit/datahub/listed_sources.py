"""Lists a source as registering does, without a registry."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.sources import found, look_over
from polyreme_datahub.sources.open import describe_and_look, describe_files, open_source
from polyreme_datahub.sources.types import RawRecord, Source


def described(path: Path) -> dict[str, Any]:
    """Describe a JSON Lines file as releases before the listing did (form 1)."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"kind": "jsonl", "form": 1, "path": str(path.resolve()), "sha256": digest}


class Shelf:
    """Where listings of one test lie, and the source that was listed last."""

    def __init__(self, folder: Path) -> None:
        self.lakehouse = Lakehouse(open_store(f"file://{folder}"))
        self.description: Mapping[str, Any] = {}
        self.records = 0

    def opened(self, path: Path | str) -> Source:
        """List a source without looking at its records."""
        self.description, self.records = describe_files(
            str(path), store=self._store, count_pages=len, progress=lambda _found: None
        )
        return open_source(self.description, self.lakehouse)

    def add(self, path: Path | str) -> Source:
        """List a source and look at its records."""
        self.description, self.records = describe_and_look(
            str(path), self.lakehouse, store=self._store, count_pages=len, progress=lambda _found: None
        )
        return open_source(self.description, self.lakehouse)

    def _store(self, file: BinaryIO) -> tuple[str, int]:
        return self.lakehouse.put_file(file, before=lambda _digest, _size: None)

    def read(self, path: Path | str) -> list[RawRecord]:
        """Read all records of a source."""
        source = self.add(path)
        return [source.read(at) for at in range(self.records)]

    @property
    def looked(self) -> str:
        """What the records were understood to be."""
        return look_over.sentence(self.description["looked"])

    @property
    def found(self) -> str:
        """What was found."""
        return found.sentence(self.description["found"])
