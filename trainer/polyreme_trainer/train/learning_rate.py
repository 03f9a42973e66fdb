"""The learning rate of a step by the trainer's settings."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_planner.learning_rate import RateSchedule, rate_at
from polyreme_trainer.train.settings import TrainSettings


def rate_of(step: int, settings: TrainSettings, skipped: Sequence[int] = ()) -> float:
    """Return the learning rate of a step: by its curriculum stage, or by the optimizer's schedule.

    Skipped steps of its stage do not advance the schedule.
    """
    stage = settings.stage_at(step)
    step -= sum(stage.first_step <= number < step for number in skipped)
    of = settings.optimizer
    usual = RateSchedule(
        learning_rate=of.learning_rate,
        final_learning_rate=of.final_learning_rate,
        schedule=of.schedule,
        warmup_steps=of.warmup_steps,
        decay_steps=of.decay_steps,
    )
    return rate_at(step, usual, settings.curriculum_stages, steps=settings.steps)
