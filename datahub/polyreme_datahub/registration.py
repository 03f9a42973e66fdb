"""Registers datasets: lists their files, stores the listing, and adds the version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from polyreme_datahub.dataset_views import check_name
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.registry import blobs, datasets
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rebuild import store_document
from polyreme_datahub.sandbox.count_pages import PageCounter
from polyreme_datahub.sources.found import Found
from polyreme_datahub.sources.open import describe_and_look, describe_generated, identity_of


def add_dataset(
    database: Database,
    lakehouse: Lakehouse,
    name: str,
    source: str | Path | Mapping[str, Any],
    *,
    now_s: Callable[[], float],
    progress: Callable[[Found], None] = lambda _found: None,
) -> DatasetVersion:
    """Register a version; see ``polyreme_datahub.hub.register``."""
    check_name(name)
    if isinstance(source, Mapping):
        description, records = describe_generated(source)
    else:

        def store(file: BinaryIO) -> tuple[str, int]:
            return lakehouse.put_file(file, before=lambda *blob: blobs.hold(database, dict([blob]), now_s=now_s()))

        with contextlib.closing(PageCounter()) as counter:
            description, records = describe_and_look(
                str(source), lakehouse, store=store, count_pages=counter.count, progress=progress
            )
    digest = identity_of(description)
    return datasets.add_version(
        database,
        name=name,
        source=description,
        digest=digest,
        records=records,
        now_s=now_s(),
        store_first=store_document(lakehouse.store),
    )
