"""Checkpoint roots of tests: a folder as the store that ranks and leaders see."""

from __future__ import annotations

from pathlib import Path

from polyreme_api.checkpoint_inventory import State, survey
from polyreme_api.commit_marker import CommitMarker
from polyreme_api.history import ResumePoint, checkpoint_name
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import ObjectStore
from polyreme_datahub.objects import open_store
from polyreme_trainer.checkpoint.commit import commit


def store_at(root: Path) -> ObjectStore:
    return open_store(root.as_uri(), sleep=lambda _: None)


def list_checkpoints(root: Path) -> tuple[list[CheckpointRef], list[CheckpointRef]]:
    """Checkpoints that are whole, and those that are torn."""
    seen = survey(store_at(root))
    return seen.committed, [stored.reference for stored in seen.of(State.TORN)]


def damaged(root: Path) -> dict[str, str]:
    """Why each damaged checkpoint is that."""
    return {stored.name: stored.why for stored in survey(store_at(root)).of(State.DAMAGED)}


def read_resume_points(root: Path) -> list[ResumePoint]:
    return list(survey(store_at(root)).points)


def at(attempt: int, step: int) -> CheckpointRef:
    return CheckpointRef(attempt=attempt, step=step)


def marker(attempt: int = 1, step: int = 5, **changed: object) -> CommitMarker:
    """A marker that names no file."""
    plain = CommitMarker(
        attempt=attempt,
        step=step,
        world=1,
        model_digest="d",
        model_shape={},
        plan_hash="p",
        files={},
        loader={"seed": 1},
        committed_at_s=float(step),
    )
    return plain.model_copy(update=changed)


def commit_empty(store: ObjectStore, attempt: int, step: int) -> str:
    """Commit a checkpoint without files; return its name."""
    commit(store, marker(attempt, step))
    return checkpoint_name(at(attempt, step))
