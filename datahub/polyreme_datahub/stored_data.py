"""Stored objects that a job's ranks read: which they are, whether they are there, and what was found damaged.

It looks at names and sizes only, so it is cheap enough to ask while a run trains; bytes are checked where they are
read.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.blocks import Journal
from polyreme_datahub.index.damage import DamageNote, notes_of
from polyreme_datahub.index.format import Manifest, parse_plan, plan_key, steps_in
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader.read.blob_files import read_blob
from polyreme_datahub.objects import open_store

LOOKS_MAX = 8
"""Requests in flight."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredData:
    """State of a job's stored data."""

    processed: bool
    """Whether its plan object is there: the data was processed once."""
    missing: tuple[str, ...] = ()
    """Keys that are gone, cut short, or (manifest and plan) damaged."""
    notes: tuple[DamageNote, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether ranks can read it, as far as anybody knows."""
        return self.processed and not self.missing and not self.notes


def look(objects_url: str, spec: TrainingJobSpec, *, job: str, shards: bool = True) -> StoredData:
    """Look at the stored data of a job.

    Args:
        objects_url: As in ``hub.register``.
        spec: The job's spec.
        job: As in ``hub.process``.
        shards: Whether to look at each shard, too: one request for each.

    Raises:
        StoreFailedError: If the store stays away.
    """
    store = open_store(objects_url)
    key = plan_key(job, plan_data(spec))
    try:
        plan = parse_plan(store.get(key), key.rpartition("/")[2])
    except ObjectNotFoundError:
        return StoredData(processed=False, notes=tuple(notes_of(store, _growing(store, spec, key))))
    except IndexDamagedError:
        return StoredData(processed=True, missing=(key,))
    if spec.training.epochs is not None and steps_in(plan, spec.training.epochs) is None:
        return StoredData(processed=False)
    manifests = list(dict.fromkeys(plan["manifests"].values()))
    missing = [key for digest in manifests for key in _missing(store, digest, shards=shards)]
    tokenizer = blob_key(plan["tokenizer"])
    if not store.exists(tokenizer):
        missing.append(tokenizer)
    notes = notes_of(store, [*manifests, plan["tokenizer"], *_growing(store, spec, key)])
    return StoredData(processed=True, missing=tuple(missing), notes=tuple(notes))


def _growing(store: ObjectStore, spec: TrainingJobSpec, key: str) -> list[str]:
    """Return under which digests ranks note damage that opened the data while they were processed."""
    if not spec.data.start_while_processing:
        return []
    try:
        opening = Journal(store, key).opening()
    except IndexDamagedError:
        return []
    return [] if opening is None else [of.manifest for of in opening.growing.values()]


def _missing(store: ObjectStore, digest: str, *, shards: bool) -> list[str]:
    try:
        manifest = Manifest.from_bytes(read_blob(store, digest))
    except IndexDamagedError:
        return [blob_key(digest)]
    stored = {shard.digest: shard.size_bytes for shard in manifest.shards} | manifest.sample_shards
    sizes = {blob_key(digest): size_bytes for digest, size_bytes in stored.items() if shards}
    with ThreadPoolExecutor(LOOKS_MAX) as threads:
        seen = dict(zip(sizes, threads.map(lambda key: _size(store, key), sizes), strict=True))
    return [key for key, size in sizes.items() if seen[key] != size]


def _size(store: ObjectStore, key: str) -> int | None:
    return next((info.size_bytes for info in store.list(key) if info.key == key), None)
