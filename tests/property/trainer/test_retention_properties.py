"""Retention with rollbacks: one checkpoint from before the window stays, and few others do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.history import ResumePoint
from polyreme_api.progress import CheckpointRef
from polyreme_trainer.checkpoint.retention import Rule, expendable


@settings(max_examples=200, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    window=st.integers(1, 300),
    kept=st.integers(1, 5),
)
def test_a_checkpoint_from_before_the_window_stays_and_at_most_two_more_than_asked_for(
    gaps: list[int], window: int, kept: int
) -> None:
    """Saves come at any distance: a stop, a stage and a person ask for some."""
    points, rule = [ResumePoint(attempt=1)], Rule(kept=kept, window_steps=window)
    stored: dict[CheckpointRef, float] = {}
    saved, step = [], 0
    for gap in gaps:
        step += gap
        saved.append(step)
        stored[CheckpointRef(attempt=1, step=step)] = float(step)
        for gone in expendable(stored, [], points, attempt=1, rule=rule, now_s=float(step)):
            del stored[gone]
        steps = sorted(of.step for of in stored)
        assert steps[-kept:] == saved[-kept:]
        assert len(steps) <= kept + 2
        # A rollback may resume there from a spike in the very next step, and in any until the next save.
        if saved[0] < step - window:
            assert steps[0] < step - window, "one was saved so early, so one is there"
