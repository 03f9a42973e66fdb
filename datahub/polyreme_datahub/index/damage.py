"""Notes about stored data that a reader found damaged, one small file each.

The rank that finds damage leaves the note; the run and its report show it; the next processing checks every byte of the
index that it names, makes the index again where that is needed, and removes the note. Notes of an index lie together,
so to look for them is one listing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from polyreme_api.store import ObjectStore

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


def note_damage(root: Path, index: str, error: str, *, ordinal: int | None = None, sample_id: str = "") -> None:
    """Leave a note; the reader reports the damage by itself too, so a full disk here changes nothing."""
    name = WHOLE if ordinal is None else str(ordinal)
    note = {"ordinal": ordinal, "sample_id": sample_id, "error": error}
    with contextlib.suppress(OSError):
        folder = root / FOLDER / index
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(note), "utf-8")
        temporary.replace(folder / f"{name}.json")


def is_noted(store: ObjectStore, index: str) -> bool:
    """Tell whether somebody found an index damaged."""
    return next(iter(store.list(f"{FOLDER}/{index}/")), None) is not None


def drop_notes(store: ObjectStore, index: str) -> None:
    """Remove the notes about an index that is whole again."""
    for info in list(store.list(f"{FOLDER}/{index}/")):
        store.delete(info.key)


def notes_of(root: Path, indexes: Iterable[str]) -> list[DamageNote]:
    """Return the notes about some indexes, each index's by name."""
    found: list[DamageNote] = []
    for index in indexes:
        for path in sorted(islice((root / FOLDER / index).glob("*.json"), NOTES_MAX)):
            try:
                value = json.loads(path.read_bytes())
                found.append(DamageNote(index=index, error=str(value["error"])))
            except (OSError, ValueError, KeyError, TypeError):
                # That there is a note says enough.
                found.append(DamageNote(index=index, error=f"note {path.name} can't be read"))
    return found
