"""Learning-rate schedules: pure functions of the step, so a checkpoint needs to store only the step.

Every schedule rises linearly during the warm-up. ``WSD`` (warm-up, stable, decay: arXiv:2404.06395, section 4) then
stays constant and falls linearly over the last steps; without decay steps it stays constant to the end. ``Cosine``
(arXiv:1608.03983, one period) falls along half a cosine over the last steps, or over all steps after the warm-up.

No schedule depends on the number of ranks. A job of another size trains each step on the same packs, in more or fewer
microbatches, so the tokens of a step stay the same, and so does the learning rate that suits them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from polyreme_planner.curriculum import CurriculumStage, stage_at

COSINE = "Cosine"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """A learning-rate schedule."""

    learning_rate: float
    """Peak."""
    final_learning_rate: float = 0.0
    """The learning rate after its decay."""
    schedule: str = "WSD"
    warmup_steps: int = 0
    decay_steps: int = 0


def rate_at(step: int, usual: RateSchedule, stages: Sequence[CurriculumStage], *, steps: int) -> float:
    """Return the learning rate of a step: by its curriculum stage, or by the optimizer's schedule.

    Args:
        step: The step about to be taken, from 1.
        usual: The optimizer's schedule.
        stages: Curriculum stages, at least one.
        steps: Steps of the whole run, not of this attempt.
    """
    stage = stage_at(stages, step)
    if stage.rate is None:
        return learning_rate(step, usual, steps=steps)
    given = stage.rate
    own = RateSchedule(
        learning_rate=_given(given.learning_rate, usual.learning_rate),
        final_learning_rate=_given(given.final_learning_rate, usual.final_learning_rate),
        schedule=given.schedule or usual.schedule,
        warmup_steps=given.warmup_steps,
        decay_steps=given.decay_steps,
    )
    return learning_rate(step - stage.first_step + 1, own, steps=stage.steps)


def learning_rate(step: int, of: RateSchedule, *, steps: int) -> float:
    """Return the learning rate of a step; the step after the last would have the final rate.

    Args:
        step: The step about to be taken, from 1.
        of: Peak, final rate and schedule.
        steps: Steps over which the schedule runs.
    """
    warm = min(1.0, step / of.warmup_steps) if of.warmup_steps else 1.0
    over = of.decay_steps
    if of.schedule == COSINE:
        over = over or max(0, steps - of.warmup_steps)
    left = min(1.0, (steps - step + 1) / over) if over else 1.0
    if of.schedule == COSINE:
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    return of.learning_rate * warm * left + of.final_learning_rate * (1.0 - left)


def _given(own: float | None, usual: float) -> float:
    return usual if own is None else own
