"""Which checkpoints may go: a pure choice, and its application."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from polyreme_api.history import ResumePoint, attempt_spans, checkpoint_name, is_history
from polyreme_api.progress import CheckpointRef
from polyreme_trainer.checkpoint.directory import check_not_fenced, list_checkpoints, read_resume_points, remove

_log = logging.getLogger(__name__)


def expendable(
    committed: Sequence[CheckpointRef],
    torn: Sequence[CheckpointRef],
    points: Sequence[ResumePoint],
    *,
    attempt: int,
    kept: int,
) -> list[CheckpointRef]:
    """Choose what to delete: all but the newest ``kept`` of history, and what was left outside it.

    Without any resume point nothing says what history is, and every committed checkpoint counts. Without any committed
    checkpoint in history nothing goes. What newer attempts left is theirs.

    Args:
        committed: Checkpoints with a marker.
        torn: Directories without one; no save of this attempt is in flight.
        points: Where attempts up to this one begin.
        attempt: Number of this attempt.
        kept: Checkpoints of history to keep; at least one stays.
    """
    spans = attempt_spans(points)
    known = [c for c in committed if not points or is_history(c, spans)]
    history = sorted(known, key=lambda c: (c.step, c.attempt))
    if not history:
        return []
    stray = [c for c in committed if c not in known and c.attempt < attempt]
    left = [c for c in torn if c.attempt <= attempt]
    return history[: max(0, len(history) - max(1, kept))] + stray + left


def retain(root: Path, *, attempt: int, kept: int) -> list[str]:
    """Delete what is expendable, and return the names; called after a commit, by its writer, with no save in flight.

    Why no race loses the newest in history: a leader claims its attempt, lists, chooses; this writer commits, looks for
    a claim, deletes. If it finds none, every later list shows the commit, and no leader chooses what is older.

    Raises:
        FencedError: If a newer attempt has begun: what is expendable is no longer this writer's to say.
        RefusedError: If a resume point is damaged.
        OSError: If the disk refuses.
    """
    committed, torn = list_checkpoints(root)
    check_not_fenced(root, attempt)
    points = [point for point in read_resume_points(root) if point.attempt <= attempt]
    names = [checkpoint_name(c) for c in expendable(committed, torn, points, attempt=attempt, kept=kept)]
    for name in names:
        remove(root / name)
        _log.info("checkpoint deleted by retention: %s", name)
    return names
