"""Learning-rate schedules: pure functions of the step, so that a checkpoint needs the step alone.

Every one rises linearly over the warm-up. ``WSD`` (warm-up, stable, decay: arXiv:2404.06395, section 4) then stays, and
falls linearly over the last steps; without such steps it is constant. ``COSINE`` (arXiv:1608.03983, one period) falls
along half a cosine over the last steps, or over all behind the warm-up.

No schedule knows how many ranks there are. A job of another size makes its steps of the same packs, in more or fewer
microbatches, so tokens a step stay what they were, and with them the learning rate that fits them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyreme_trainer.train.settings import OptimizerSettings, TrainSettings


class Schedule(enum.StrEnum):
    """How the learning rate goes after the warm-up."""

    WSD = "WSD"
    COSINE = "Cosine"


def rate_of(step: int, settings: TrainSettings) -> float:
    """Say the learning rate of a step: along its stage's own schedule, or along the optimizer's over the whole run."""
    stage = settings.stage_of(step)
    if stage.rate is None:
        return learning_rate(step, settings.optimizer, steps=settings.steps)
    said, usual = stage.rate, settings.optimizer
    own = dataclasses.replace(
        usual,
        learning_rate=usual.learning_rate if said.learning_rate is None else said.learning_rate,
        final_learning_rate=usual.final_learning_rate if said.final_learning_rate is None else said.final_learning_rate,
        schedule=usual.schedule if said.schedule is None else Schedule(said.schedule),
        warmup_steps=said.warmup_steps,
        decay_steps=said.decay_steps,
    )
    return learning_rate(step - stage.first_step + 1, own, steps=stage.steps)


def learning_rate(step: int, settings: OptimizerSettings, *, steps: int) -> float:
    """Say the learning rate of a step; the one behind the last would have the final rate.

    Args:
        step: The step about to be taken, from 1.
        settings: Peak, final rate and shape.
        steps: Steps of the whole run, not of this attempt.
    """
    warm = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    over = settings.decay_steps
    if settings.schedule is Schedule.COSINE:
        over = over or max(0, steps - settings.warmup_steps)
    left = min(1.0, (steps - step + 1) / over) if over else 1.0
    if settings.schedule is Schedule.COSINE:
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return settings.learning_rate * warm * left + settings.final_learning_rate * (1.0 - left)
