"""What a job's ranks read of a local object store: which files, whether they are there, and what was found damaged.

It looks at names and sizes only, so it is cheap enough to ask while a run trains; bytes are checked where they are
read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.damage import DamageNote, notes_of
from polyreme_datahub.index.format import Manifest, parse_plan, plan_key
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader.shards import read_blob
from polyreme_datahub.locations import local_root


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredData:
    """How a job's stored data stands."""

    processed: bool
    """Whether its plan object is there: the data was processed once."""
    missing: tuple[str, ...] = ()
    """Keys that are gone, cut short, or (manifest and plan) damaged."""
    notes: tuple[DamageNote, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether ranks can read it, as far as anybody knows."""
        return self.processed and not self.missing and not self.notes


def look(objects_url: str, spec: TrainingJobSpec, *, job: str) -> StoredData:
    """Look at the stored data of a job.

    Args:
        objects_url: As in ``hub.register``.
        spec: The job's spec.
        job: As in ``hub.process``.
    """
    root = local_root(objects_url)
    path = root / plan_key(job, plan_data(spec))
    try:
        plan = parse_plan(path.read_bytes(), path.name)
    except OSError:
        return StoredData(processed=False)
    except IndexDamagedError:
        return StoredData(processed=True, missing=(f"plans/{path.name}",))
    manifests = list(dict.fromkeys(plan["manifests"].values()))
    missing = [key for digest in manifests for key in _missing(root, digest)]
    tokenizer = blob_key(plan["tokenizer"])
    if not (root / tokenizer).is_file():
        missing.append(tokenizer)
    notes = notes_of(root, [*manifests, plan["tokenizer"]])
    return StoredData(processed=True, missing=tuple(missing), notes=tuple(notes))


def _missing(root: Path, digest: str) -> list[str]:
    try:
        manifest = Manifest.from_bytes(read_blob(root, digest))
    except IndexDamagedError:
        return [blob_key(digest)]
    return [
        blob_key(shard.digest) for shard in manifest.shards if _size(root / blob_key(shard.digest)) != shard.size_bytes
    ]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
