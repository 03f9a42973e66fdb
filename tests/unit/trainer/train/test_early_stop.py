"""Early stop: the decision as a pure function of the held-out losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from polyreme_trainer.train.early_stop import HeldOutHistory
from polyreme_trainer.train.settings import EarlyStopRule


def stopping_step(losses: Sequence[float | None], rule: EarlyStopRule | None) -> int | None:
    """Return the step, counted from 1, after which a run with these held-out losses ends."""
    history = HeldOutHistory()
    for step, loss in enumerate(losses, start=1):
        history = HeldOutHistory.of(history.after(step, loss, rule).saved())  # as if each step were resumed
        if history.stops(rule):
            return step
    return None


@pytest.mark.parametrize(
    ("losses", "rule", "step"),
    [
        ([3.0, 2.0, 2.1, 2.0], EarlyStopRule(patience=2), 4),
        ([3.0, 2.0, 2.1, 1.9, 2.0, 2.0], EarlyStopRule(patience=2), 6),
        ([3.0, 2.95, 2.92, 2.85], EarlyStopRule(patience=2, min_delta=0.1), 3),
        ([3.0, 2.95, 2.85, 2.8], EarlyStopRule(patience=2, min_delta=0.1), None),
        ([3.0, None, None, None], EarlyStopRule(patience=1), None),
        ([math.nan, 3.0, math.inf, math.nan], EarlyStopRule(patience=2), 4),
        ([3.0, 4.0, 5.0], None, None),
    ],
    ids=["no gain", "a late gain", "slow gains", "gains add up", "not measured", "no numbers", "no rule"],
)
def test_a_run_ends_after_so_many_measurements_without_a_lower_loss(
    losses: Sequence[float | None], rule: EarlyStopRule | None, step: int | None
) -> None:
    assert stopping_step(losses, rule) == step


@pytest.mark.parametrize(
    ("history", "rule", "words"),
    [
        (
            HeldOutHistory(lowest=2.51234, lowest_step=40, misses=3),
            EarlyStopRule(patience=3),
            "the held-out loss has not fallen below 2.512 (step 40) in 3 measurements",
        ),
        (
            HeldOutHistory(lowest=2.51234, lowest_step=40, misses=1),
            EarlyStopRule(patience=1, min_delta=0.01),
            "the held-out loss has not fallen by more than 0.01 below 2.512 (step 40) in 1 measurement",
        ),
        (HeldOutHistory(misses=2), EarlyStopRule(patience=2), "the held-out loss was no number in 2 measurements"),
    ],
)
def test_the_reason_names_the_lowest_loss_and_its_step(
    history: HeldOutHistory, rule: EarlyStopRule, words: str
) -> None:
    assert history.why(rule) == words
