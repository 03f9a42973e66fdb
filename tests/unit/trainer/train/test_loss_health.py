"""Spikes of the loss: the verdict as a pure function of the history, and what a skipped step does not advance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from polyreme_api.errors import StepFailedError
from polyreme_planner.curriculum import CurriculumStage, Learner
from polyreme_trainer.train.loss_health import LASTING_STEPS, LossHistory, check_finite, times_updated
from polyreme_trainer.train.settings import SpikeRule

RULE = SpikeRule(action="Skip", window_steps=32)


def filled(steps: int = 32) -> LossHistory:
    """Return a history with a window of a level loss."""
    history, draw = LossHistory(), np.random.default_rng(1)
    for step in range(1, steps + 1):
        assert history.judge(step, 3.0 + 0.02 * draw.standard_normal(), 1.0 + 0.05 * draw.random(), RULE) is None
    return history


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [(3.5, 1.0, "loss"), (3.0, 9.0, "gradient norm"), (math.nan, 1.0, "loss"), (3.0, math.inf, "gradient norm")],
)
def test_a_jump_of_the_loss_or_of_the_norm_is_a_spike(loss: float, norm: float, what: str) -> None:
    history = filled()
    known = list(history.losses)
    spike = history.judge(33, loss, norm, RULE)
    assert spike is not None
    assert (spike.step, spike.what) == (33, what)
    assert history.losses == known, "it is no part of what later steps are compared with"
    assert history.judge(34, 3.0, 1.0, RULE) is None


def test_a_jump_of_the_update_norm_is_a_spike_once_half_of_its_window_is_measured() -> None:
    rule = SpikeRule(window_steps=32, update_norm_steps=4)
    history = LossHistory()
    found = [history.judge(step, 3.0, 1.0, rule, 40.0 if rule.measures_update(step) else None) for step in range(1, 17)]
    assert found == [None] * 16
    assert history.update_norms == [40.0] * 4
    spike = history.judge(20, 3.0, 1.0, rule, 90.0)
    assert spike is not None
    assert str(spike) == "spike in step 20: update norm 90, limit 80"
    assert history.judge(20, 3.0, 1.0, rule, 79.0) is None
    assert LossHistory.of(history.saved()).judge(24, 3.0, 1.0, rule, 90.0) == history.judge(24, 3.0, 1.0, rule, 90.0)
    for step in range(24, 124, 4):
        history.judge(step, 3.0, 1.0, rule, 40.0)
    assert len(history.update_norms) == 8, "as many as the window measures"
    early = LossHistory(losses=[3.0] * 32, norms=[1.0] * 32, update_norms=[40.0] * 3)
    assert early.judge(20, 3.0, 1.0, rule, 90.0) is None


def test_nothing_is_a_spike_until_half_the_window_is_filled_again() -> None:
    assert filled(15).judge(16, 9.0, 9.0, RULE) is None
    assert filled(16).judge(17, 9.0, 9.0, RULE) is not None
    declared = filled()
    declared.forget()
    assert declared.judge(33, 9.0, 9.0, RULE) is None


def test_a_level_that_lasts_is_the_new_one() -> None:
    history = filled()
    alarms = [history.judge(step, 5.0, 1.0, RULE) is not None for step in range(33, 133)]
    assert sum(alarms) == LASTING_STEPS - 1
    assert not any(alarms[LASTING_STEPS:])


def test_a_resumed_history_decides_as_the_whole_one() -> None:
    whole, draw = filled(), np.random.default_rng(7)
    resumed = LossHistory.of(whole.saved())
    for step in range(33, 300):
        loss, norm = 3.0 + 0.1 * draw.standard_t(2), math.exp(0.5 * draw.standard_t(2))
        assert whole.judge(step, loss, norm, RULE) == resumed.judge(step, loss, norm, RULE)


def test_steps_that_are_not_finite_are_skipped_three_times_in_a_row_at_most() -> None:
    history = filled()
    for step in range(33, 36):
        check_finite(history, step, math.nan, 1.0, RULE)
        history.judge(step, math.nan, 1.0, RULE)
    with pytest.raises(StepFailedError, match=r"loss nan, gradient norm 1\.0 in step 36"):
        check_finite(history, 36, math.nan, 1.0, RULE)
    with pytest.raises(StepFailedError):
        check_finite(filled(), 33, math.nan, 1.0, SpikeRule(action="Notify"))


def test_a_skipped_step_counts_for_no_part_that_it_would_have_updated() -> None:
    stages = [
        CurriculumStage(steps=10, learners=frozenset({Learner.PROJECTOR})),
        CurriculumStage(first_step=11, steps=10, learners=frozenset({Learner.PROJECTOR, Learner.DECODER})),
    ]
    assert times_updated(stages, 15, [4, 12, 13]) == {Learner.PROJECTOR: 12, Learner.DECODER: 3}
