"""Finds the masks of samples: from the registry's rows to the records, and from these to the masks' bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.registry.datasets import find_version
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.results import places_of, records_of


def masks_of(
    database: Database, lakehouse: Lakehouse, samples: Collection[tuple[str, str]]
) -> dict[tuple[str, str], list[Blob | None]]:
    """Return the masks of samples; arguments and errors as ``hub.read_masks``."""
    records: dict[tuple[str, str], str] = {}
    for reference, named in itertools.groupby(sorted(samples), key=lambda sample: sample[0]):
        version = find_version(database, reference)
        found = records_of(database, version.id, [sample_id for _, sample_id in named])
        records |= {(reference, sample_id): record for sample_id, record in found.items()}
    contents = _parts(database, lakehouse, set(records.values()))
    masks = {sample: json.loads(contents[record]).get("masks", ()) for sample, record in records.items()}
    data = _parts(database, lakehouse, {digest for digests in masks.values() for digest in digests if digest})
    return {
        sample: [None if digest is None else Blob(data[digest], digest=digest) for digest in digests]
        for sample, digests in masks.items()
        if any(digests)
    }


def _parts(database: Database, lakehouse: Lakehouse, digests: set[str]) -> dict[str, bytes]:
    places = places_of(database, digests)
    if missing := sorted(digests - places.keys()):
        raise ObjectNotFoundError(f"no artifact {missing[0]} in the registry")
    return lakehouse.get_parts(places)
