"""Commit and removal of a checkpoint: the marker is written last and deleted first.

Everything goes through the object store, a folder or a bucket alike, which must guarantee two things: a put is durable
and whole, and create-if-absent has one winner.
"""

from __future__ import annotations

import contextlib
import json

from polyreme_api.checkpoint_inventory import check_not_fenced
from polyreme_api.commit_marker import CommitMarker, seal
from polyreme_api.errors import FencedError
from polyreme_api.history import COMMIT_MARKER, DAMAGE_RECORD, checkpoint_name
from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_trainer.checkpoint.block_io import DamagedError


def commit(store: ObjectStore, marker: CommitMarker) -> None:
    """Commit a checkpoint, as the last act of a save: every file that the marker names is durable.

    Raises:
        FencedError: If a newer attempt has begun, or this checkpoint was committed before.
        StoreFailedError: If the store does not take the marker.
    """
    check_not_fenced(store, marker.attempt)
    name = checkpoint_name(marker.reference)
    try:
        store.put_if_absent(f"{name}/{COMMIT_MARKER}", seal(marker))
    except ObjectExistsError as error:
        raise FencedError(
            f"checkpoint exists: {name} was committed by another writer of attempt {marker.attempt}"
        ) from error


def remove(store: ObjectStore, name: str) -> None:
    """Delete a checkpoint: its marker first, so that a half-deleted one is torn rather than damaged.

    Raises:
        StoreFailedError: If the store refuses.
    """
    store.delete(f"{name}/{COMMIT_MARKER}")
    for info in list(store.list(f"{name}/")):
        store.delete(info.key)


def condemn(store: ObjectStore, error: DamagedError) -> None:
    """Record that a committed checkpoint is damaged, so that no later attempt resumes there; the first record stays.

    Raises:
        StoreFailedError: If the store does not take the record.
    """
    record = json.dumps({"damage": error.damage}, indent=1).encode()
    with contextlib.suppress(ObjectExistsError):
        store.put_if_absent(f"{error.name}/{DAMAGE_RECORD}", record)
