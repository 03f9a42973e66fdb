"""Learning-rate schedules: pure functions of the step, so a checkpoint needs to store only the step.

Every schedule rises linearly during the warm-up. ``WSD`` (warm-up, stable, decay: arXiv:2404.06395, section 4) then
stays constant and falls linearly over the last steps; without decay steps it stays constant to the end. ``COSINE``
(arXiv:1608.03983, one period) falls along half a cosine over the last steps, or over all steps after the warm-up.

No schedule depends on the number of ranks. A job of another size trains each step on the same packs, in more or fewer
microbatches, so the tokens of a step stay the same, and so does the learning rate that suits them.
"""

from __future__ import annotations

import dataclasses
import math

from polyreme_trainer.train.settings import LearningRateSchedule, OptimizerSettings, TrainSettings


def rate_of(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step: by its curriculum stage, or by the optimizer's schedule."""
    stage = settings.stage_at(step)
    if stage.rate is None:
        return learning_rate(step, settings.optimizer, steps=settings.steps)
    given, usual = stage.rate, settings.optimizer
    own = dataclasses.replace(
        usual,
        learning_rate=usual.learning_rate if given.learning_rate is None else given.learning_rate,
        final_learning_rate=(
            usual.final_learning_rate if given.final_learning_rate is None else given.final_learning_rate
        ),
        schedule=usual.schedule if given.schedule is None else LearningRateSchedule(given.schedule),
        warmup_steps=given.warmup_steps,
        decay_steps=given.decay_steps,
    )
    return learning_rate(step - stage.first_step + 1, own, steps=stage.steps)


def learning_rate(step: int, settings: OptimizerSettings, *, steps: int) -> float:
    """Return the learning rate of a step; the step after the last would have the final rate.

    Args:
        step: The step about to be taken, from 1.
        settings: Peak, final rate and schedule.
        steps: Steps of the whole run, not of this attempt.
    """
    warm = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    over = settings.decay_steps
    if settings.schedule is LearningRateSchedule.COSINE:
        over = over or max(0, steps - settings.warmup_steps)
    left = min(1.0, (steps - step + 1) / over) if over else 1.0
    if settings.schedule is LearningRateSchedule.COSINE:
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return settings.learning_rate * warm * left + settings.final_learning_rate * (1.0 - left)
