"""Fix where an attempt begins: once, by create-if-absent, from what is committed and history."""

from __future__ import annotations

import contextlib
import sys

from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.history import (
    COMMIT_MARKER,
    ResumePoint,
    attempt_key,
    claim_key,
    parse_checkpoint_name,
)
from polyreme_api.marker import ForeignFormatError, parse_marker
from polyreme_api.progress import CheckpointRef
from polyreme_api.resume import fix_resume_point
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore

NAMED_MAX = 3
"""Missing files that a message names."""


def fix_resume(store: ObjectStore, *, attempt: int, by: str, now_s: float) -> ResumePoint | None:
    """Fix the attempt's resume point and return it; None where a process of another name than ``by`` has fixed it.

    Raises:
        ForeignFormatError: If a checkpoint is of a format that this version does not read.
        RefusedError: If a resume point is damaged.
        StoreFailedError: If the store stays away.
    """
    return fix_resume_point(_StoreRoot(store), attempt=attempt, by=by, now_s=now_s)


class _StoreRoot:
    """A checkpoint root in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def claim(self, attempt: int) -> None:
        """Create the attempt's claim, if it is absent."""
        with contextlib.suppress(ObjectExistsError):
            self._store.put_if_absent(claim_key(attempt), b"")

    def look(self) -> tuple[list[ResumePoint], list[CheckpointRef]]:
        """Return the points that are fixed, and the checkpoints that are committed and whole."""
        keys = {info.key: info.size_bytes for info in self._store.list("")}
        points = [_point(self._store, key) for key in keys if key.startswith("attempts/") and _is_point(key)]
        return points, _committed(self._store, keys)

    def put_if_absent(self, point: ResumePoint) -> ResumePoint:
        """Create the point of its attempt, and return the one that stands there then."""
        try:
            self._store.put_if_absent(attempt_key(point.attempt), point.model_dump_json(by_alias=True).encode())
        except ObjectExistsError:
            return _point(self._store, attempt_key(point.attempt))
        return point


def _point(store: ObjectStore, key: str) -> ResumePoint:
    try:
        return ResumePoint.model_validate_json(store.get(key))
    except ValueError as error:
        # Without it nobody knows what is history: nothing is guessed.
        raise RefusedError(f"resume point {key} can't be read: it is damaged, or not ours") from error


def _is_point(key: str) -> bool:
    stem = key.removeprefix("attempts/").removesuffix(".json")
    return stem.isdigit() and key == attempt_key(int(stem))


def _committed(store: ObjectStore, keys: dict[str, int]) -> list[CheckpointRef]:
    """Checkpoints with a marker whose files are all there in full; torn ones are named in the log."""
    committed = []
    for key in keys:
        name, _, rest = key.partition("/")
        if rest != COMMIT_MARKER:
            continue
        try:
            reference = parse_checkpoint_name(name)
            marker = parse_marker(store.get(key), name=name)
        except ForeignFormatError:
            raise
        except ObjectNotFoundError:
            continue  # deleted since it was listed, as only one older than the newest is
        except (InvalidConfigError, RefusedError) as error:
            print(f"checkpoint {name} is torn and not used: {error}", file=sys.stderr)
            continue
        missing = [file for file, saved in marker.files.items() if keys.get(f"{name}/{file}") != saved.size_bytes]
        if missing:
            print(f"checkpoint {name} is torn and not used: {', '.join(sorted(missing)[:NAMED_MAX])}", file=sys.stderr)
        else:
            committed.append(reference)
    return committed
