"""Files of a checkpoint root on a local or shared file system: durable writes, digests, listings.

A directory is a checkpoint once its marker lies in it. The marker is linked into place from a finished, synced file, so
it appears whole or not at all, and only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from polyreme_api.errors import FencedError, InvalidConfigError, RefusedError
from polyreme_api.history import COMMIT_MARKER, ResumePoint, parse_checkpoint_name
from polyreme_api.marker import CommitMarker, SavedFile
from polyreme_api.progress import CheckpointRef

_ATTEMPT_FILE = re.compile(r"[0-9]{6,7}\.(json|claim)")
_CHUNK_BYTES = 1 << 20


def create_if_absent(path: Path, data: bytes) -> None:
    """Write a file durably unless one exists.

    Raises:
        FileExistsError: If one exists; nothing was changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> SavedFile:
    """Read a file for its size and digest."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return SavedFile(size_bytes=size, sha256=digest.hexdigest())


def damaged_files(directory: Path, files: Iterable[tuple[str, SavedFile]]) -> list[str]:
    """Name the files that are missing or differ from what the marker says, with the reason."""
    reasons: list[str] = []
    for name, expected in files:
        path = directory / name
        if not path.is_file():
            reasons.append(f"{name} is missing")
        elif path.stat().st_size != expected.size_bytes:
            reasons.append(f"{name} has {path.stat().st_size} bytes, the marker says {expected.size_bytes}")
        elif digest_file(path) != expected:
            reasons.append(f"{name} has another digest than the marker says")
    return reasons


def commit(root: Path, name: str, marker: CommitMarker) -> None:
    """Make a checkpoint exist, as the last thing of a save.

    Raises:
        FencedError: If a newer attempt has fixed where it begins, or this checkpoint was committed before.
        OSError: If the disk refuses.
    """
    check_not_fenced(root, marker.attempt)
    try:
        sync_directory(root / name)
        sync_directory(root)
        create_if_absent(root / name / COMMIT_MARKER, marker.model_dump_json(by_alias=True, indent=1).encode())
    except FileExistsError as error:
        raise FencedError(
            f"checkpoint exists: {name} was committed by another writer of attempt {marker.attempt}"
        ) from error
    except FileNotFoundError:
        # A newer attempt deletes what older ones left unfinished, this directory included.
        check_not_fenced(root, marker.attempt)
        raise


def check_not_fenced(root: Path, attempt: int) -> None:
    """Refuse to write for an attempt that is no longer the newest: a newer one has chosen, or is about to choose.

    Raises:
        FencedError: Naming the newer attempt.
    """
    found = [path.name for path in root.glob("attempts/*") if _ATTEMPT_FILE.fullmatch(path.name)]
    newest = max(found, key=lambda name: int(name.partition(".")[0]), default="0")
    if int(newest.partition(".")[0]) > attempt:
        raise FencedError(f"attempt is fenced: {attempt}, a newer one has begun (attempts/{newest} exists)")


def read_resume_points(root: Path) -> list[ResumePoint]:
    """Read where each attempt begins.

    Raises:
        RefusedError: If a record is damaged: it is created whole, so somebody changed it.
    """
    points: list[ResumePoint] = []
    for path in sorted((root / "attempts").glob("*.json")):
        try:
            points.append(ResumePoint.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            raise RefusedError(f"resume point is damaged: attempts/{path.name}") from error
    return points


def list_checkpoints(root: Path) -> tuple[list[CheckpointRef], list[CheckpointRef]]:
    """List the directories that bear a checkpoint's name: committed ones, and those without a marker.

    Without a marker a directory is torn, or still being written.
    """
    committed: list[CheckpointRef] = []
    torn: list[CheckpointRef] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        with contextlib.suppress(InvalidConfigError):
            (committed if (path / COMMIT_MARKER).is_file() else torn).append(parse_checkpoint_name(path.name))
    return committed, torn


def remove(directory: Path) -> None:
    """Delete a checkpoint: its marker first, so that a half-deleted one is torn rather than damaged.

    Raises:
        OSError: If the disk refuses, or another process deletes the same.
    """
    (directory / COMMIT_MARKER).unlink(missing_ok=True)
    sync_directory(directory)
    shutil.rmtree(directory)
