"""Fix where an attempt begins: once, by create-if-absent, from what is committed and history."""

from __future__ import annotations

import contextlib
import sys

from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.history import (
    COMMIT_MARKER,
    ResumePoint,
    attempt_key,
    checkpoint_name,
    choose_resume,
    claim_key,
    parse_checkpoint_name,
)
from polyreme_api.marker import ForeignFormatError, parse_marker
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore

NAMED_MAX = 3
"""Missing files that a message names."""


def fix_resume(store: ObjectStore, *, attempt: int, now_s: float) -> ResumePoint:
    """Fix the attempt's resume point and return it; the first writer's choice stands.

    Raises:
        ForeignFormatError: If a checkpoint is of a format that this version does not read.
        StoreFailedError: If the store stays away.
    """
    # Before the list: a late writer of an older attempt that sees it deletes nothing that may be chosen here.
    with contextlib.suppress(ObjectExistsError):
        store.put_if_absent(claim_key(attempt), b"")
    keys = {info.key: info.size_bytes for info in store.list("")}
    points = [
        ResumePoint.model_validate_json(store.get(key))
        for key in keys
        if key.startswith("attempts/") and _is_point(key)
    ]
    fixed = next((point for point in points if point.attempt == attempt), None)
    if fixed is not None:
        return fixed
    earlier = [point for point in points if point.attempt < attempt]
    chosen = choose_resume(_committed(store, keys), earlier)
    name = None if chosen is None else checkpoint_name(chosen)
    point = ResumePoint(attempt=attempt, resume_from=name, fixed_at_s=now_s)
    try:
        store.put_if_absent(attempt_key(attempt), point.model_dump_json(by_alias=True).encode())
    except ObjectExistsError:
        return ResumePoint.model_validate_json(store.get(attempt_key(attempt)))
    return point


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
