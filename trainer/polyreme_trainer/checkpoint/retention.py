"""Retention of checkpoints: a pure choice of what to delete, and its application."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from polyreme_api.checkpoint_inventory import State, check_not_fenced, survey
from polyreme_api.history import ResumePoint, attempt_spans, checkpoint_name, is_history
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import ObjectStore
from polyreme_trainer.checkpoint.commit import remove

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How much of history is kept."""

    kept: int
    """Newest checkpoints; at least one stays."""
    best: int = 0
    """Checkpoints with the lowest held-out loss, beside those."""
    age_s_max: float | None = None
    """Age beyond which a checkpoint is deleted even if it is among those; None: age does not matter."""
    window_steps: int = 0
    """Also keep a checkpoint that is more than so many steps older than the newest; 0: no such one."""


def expendable(
    committed: Mapping[CheckpointRef, float],
    torn: Sequence[CheckpointRef],
    points: Sequence[ResumePoint],
    *,
    attempt: int,
    rule: Rule,
    now_s: float,
    strays: bool = True,
    losses: Mapping[CheckpointRef, float] = MappingProxyType({}),
) -> list[CheckpointRef]:
    """Choose what to delete: of history what the rule does not keep, and what was left outside it.

    The newest of history always stays: until the newest attempt has committed one of its own, that is its resume point,
    since history is cut there. Without any resume point history is unknown, and every committed checkpoint counts.
    Without any committed checkpoint in history nothing is deleted. What newer attempts left is theirs.

    Args:
        committed: Checkpoints that are whole, and when each was committed.
        torn: Uncommitted ones: no save of this attempt is in flight.
        points: Resume points of attempts up to this one.
        attempt: Number of this attempt.
        rule: What is kept.
        now_s: The present, by the clock that committed them.
        strays: Whether committed checkpoints outside history are deleted.
        losses: Held-out losses of checkpoints that have one.
    """
    spans = attempt_spans(points)
    known = [c for c in committed if not points or is_history(c, spans)]
    history = sorted(known, key=lambda c: (c.step, c.attempt))
    if not history:
        return []
    numbered = enumerate(reversed(history))
    kept = _kept_for_rollbacks(history, rule) | best_of(history, losses, most=rule.best)
    old = [
        c
        for number, c in numbered
        if number and c not in kept and (number >= rule.kept or _is_old(committed[c], rule, now_s))
    ]
    stray = [c for c in committed if strays and c not in known and c.attempt < attempt]
    left = [c for c in torn if c.attempt <= attempt]
    return old[::-1] + stray + left


def _kept_for_rollbacks(history: Sequence[CheckpointRef], rule: Rule) -> set[CheckpointRef]:
    """Return the newest checkpoint that is older than the window, and the oldest in it, which will be that later."""
    if not rule.window_steps:
        return set()
    border = history[-1].step - rule.window_steps
    older, within = [c for c in history if c.step < border], [c for c in history if c.step >= border]
    return {*older[-1:], *within[:1]}


def best_of(
    history: Sequence[CheckpointRef], losses: Mapping[CheckpointRef, float], *, most: int
) -> set[CheckpointRef]:
    """Return the checkpoints with the lowest held-out losses, of equal ones the newest; a loss that is NaN is none."""
    measured = [c for c in history if not math.isnan(losses.get(c, math.nan))]
    return set(sorted(measured, key=lambda c: (losses[c], -c.step, -c.attempt))[:most])


def _is_old(committed_at_s: float, rule: Rule, now_s: float) -> bool:
    return rule.age_s_max is not None and now_s - committed_at_s > rule.age_s_max


def retain(store: ObjectStore, *, attempt: int, rule: Rule, now_s: float) -> list[str]:
    """Delete what is expendable, and return the names; called after a commit, by its writer, with no save in flight.

    No race loses the newest in history: a leader claims its attempt, lists, chooses; this writer commits, looks for a
    claim, deletes. If it finds none, every later list shows the commit, and no leader chooses an older one.

    Damaged checkpoints stay: the user may want to inspect or repair them. A resume point that was rebuilt from step
    records is not what the leader wrote, so nothing is deleted for lying outside the history that it shows.

    Raises:
        FencedError: If a newer attempt has begun: this writer no longer decides what is expendable.
        StoreFailedError: If the store refuses.
    """
    seen = survey(store)
    check_not_fenced(store, attempt)
    points = [point for point in seen.points if point.attempt <= attempt]
    if all(point.attempt in seen.rebuilt for point in points):
        points = []
    sure = not any(number <= attempt for number in seen.rebuilt)
    committed = {c.reference: c.marker.committed_at_s for c in seen.checkpoints if c.marker is not None}
    torn = [stored.reference for stored in seen.of(State.TORN)]
    losses = {c.reference: c.held_out_loss for c in seen.of(State.WHOLE) if c.held_out_loss is not None}
    gone = expendable(committed, torn, points, attempt=attempt, rule=rule, now_s=now_s, strays=sure, losses=losses)
    names = [checkpoint_name(c) for c in gone]
    for name in names:
        remove(store, name)
        _log.info("checkpoint deleted by retention: %s", name)
    return names
