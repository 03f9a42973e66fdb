"""Notes about stored data that a reader found damaged, one small file each.

The rank that finds damage leaves the note; the run and its report show it; the next processing checks every byte of the
index that it names, makes the index again where that is needed, and removes the note. Notes of an index lie together,
so to look for them is one listing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from itertools import islice

from polyreme_api.store import ObjectNotFoundError, ObjectStore, StoreFailedError

FOLDER = "tombstones"
NOTES_MAX = 1000
"""Notes that are read of one index."""
WHOLE = "whole"
"""Name of the note about what no sample bears: a manifest, a shard's offsets, a tokenizer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DamageNote:
    """What one rank found."""

    index: str
    """Digest of the manifest (or tokenizer)."""
    error: str


def note_damage(store: ObjectStore, index: str, error: str, *, ordinal: int | None = None, sample_id: str = "") -> None:
    """Leave a note; the reader reports the damage by itself too, so a store that fails here changes nothing."""
    name = WHOLE if ordinal is None else str(ordinal)
    note = {"ordinal": ordinal, "sample_id": sample_id, "error": error}
    with contextlib.suppress(StoreFailedError):
        store.put(f"{FOLDER}/{index}/{name}.json", json.dumps(note).encode())


def is_noted(store: ObjectStore, index: str) -> bool:
    """Tell whether a reader found an index damaged."""
    return next(iter(store.list(f"{FOLDER}/{index}/")), None) is not None


def drop_notes(store: ObjectStore, index: str) -> None:
    """Remove the notes about an index that is whole again."""
    for info in list(store.list(f"{FOLDER}/{index}/")):
        store.delete(info.key)


def notes_of(store: ObjectStore, indexes: Iterable[str]) -> list[DamageNote]:
    """Return the notes about some indexes, each index's by name; at most ``NOTES_MAX`` of one."""
    found: list[DamageNote] = []
    for index in indexes:
        for key in keys_of(store, index):
            try:
                value = json.loads(store.get(key))
                found.append(DamageNote(index=index, error=str(value["error"])))
            except ObjectNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                # That there is a note says enough.
                found.append(DamageNote(index=index, error=f"note {key} can't be read"))
    return found


def keys_of(store: ObjectStore, index: str) -> list[str]:
    """List the notes about an index."""
    return [info.key for info in islice(store.list(f"{FOLDER}/{index}/"), NOTES_MAX)]
