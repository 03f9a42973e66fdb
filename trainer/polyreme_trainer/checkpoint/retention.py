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
    """Choose what to delete: all but the newest ``kept`` of history, and what older attempts left outside it.

    Without any resume point nothing says what history is, and every committed checkpoint counts.
    A torn directory of this attempt may be the save in flight, and stays. Without any committed checkpoint in history
    nothing goes.
    """
    spans = attempt_spans(points)
    known = [c for c in committed if not points or is_history(c, spans)]
    history = sorted(known, key=lambda c: (c.step, c.attempt))
    if not history:
        return []
    stray = [c for c in committed if c not in known and c.attempt < attempt]
    left = [c for c in torn if c.attempt < attempt]
    return history[: max(0, len(history) - max(1, kept))] + stray + left


def retain(root: Path, *, attempt: int, kept: int) -> list[str]:
    """Delete what is expendable, and return the names.

    Raises:
        FencedError: If a newer attempt has begun: what is expendable is no longer this writer's to say.
    """
    committed, torn = list_checkpoints(root)
    # After the listing: a newer attempt that chose among older checkpoints is then seen, and nothing is deleted.
    check_not_fenced(root, attempt)
    names = [
        checkpoint_name(c) for c in expendable(committed, torn, read_resume_points(root), attempt=attempt, kept=kept)
    ]
    for name in names:
        remove(root / name)
        _log.info("checkpoint deleted by retention: %s", name)
    return names
