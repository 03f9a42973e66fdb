"""Extension of a run: which training a run may continue with that has trained some steps already.

The end of a run may move: its steps or epochs, the steps of its last curriculum stage, and the decay of the learning
rate. What a trained step did may not change, so resumes stay exact and an extended run equals one that had the later
end from its first step on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from polyreme_api.differences import differences
from polyreme_api.errors import InvalidConfigError
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job.model import Training
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_planner.curriculum import curriculum_stages, scored_steps
from polyreme_planner.learning_rate import COSINE, RateSchedule, rate_at

_RATES = "(decaySteps|finalLearningRate)"
END = re.compile(rf"training\.(steps|epochs|optimizer\.{_RATES}|stages\[(\d+)\]\.(steps|decaySteps|finalLearningRate))")
"""Fields that say how a run ends; of stages, only those of the last one."""
COMPARED_STEPS_MAX = 100_000
"""Newest trained steps whose learning rates are compared: decays end with the run, so an older difference shows here
too."""


Count = Callable[[Training], Training]
"""Returns a training with the steps that were counted for its epochs; raises InvalidConfigError if none were."""


def uncounted(training: Training) -> Training:
    """Return a training whose steps are given.

    Raises:
        InvalidConfigError: If they follow from epochs.
    """
    return training.with_steps(training.steps_known)


def extended(spec: TrainingJobSpec, known: Training, *, after_step: int, count: Count = uncounted) -> Training:
    """Return the training with which a run continues.

    Args:
        spec: The job's specification as it is now.
        known: By which the run has trained so far.
        after_step: Newest step that is trained, or that any rank may be training.
        count: Counts the steps of epochs.

    Raises:
        InvalidConfigError: If the change would alter a trained step, naming field and step.
    """
    asked = spec.training
    if asked == known:
        return known
    for field in changed_fields(known, asked):
        _check_field(field, known)
    before, after = count(known), count(asked)
    steps = after.steps_known
    if steps < after_step:
        raise InvalidConfigError(
            f"{_end_words(asked, steps)} is below step {after_step}, which the run has trained or is training; "
            f"expected at least {after_step}",
            field="spec.training.steps" if asked.epochs is None else "spec.training.epochs",
        )
    if steps != before.steps and (limited := [of.name for of in spec.data.sources if of.epochs_max is not None]):
        raise InvalidConfigError(
            f"training.steps may not change from {before.steps} to {steps}: source {limited[0]!r} has epochsMax, and "
            "its last window ends with the run; begin a new job by spec.startFrom",
            field="spec.training.steps",
        )
    for first, last in scored_steps(spec.model_copy(update={"training": before})):
        if steps > before.steps_known and first <= after_step + 1 and last == STEPS_MAX:
            raise InvalidConfigError(
                f"training.steps may not change from {before.steps} to {steps}: the last stage trains on preferences, "
                f"and its pairs were scored under the model before step {first}; begin a new job",
                field="spec.training.steps",
            )
    _check_rates(spec, before, after, after_step=min(after_step, before.steps_known))
    return asked


def _end_words(training: Training, steps: int) -> str:
    return (
        f"training.steps {steps}" if training.epochs is None else f"training.epochs {training.epochs} = {steps} steps"
    )


def changed_fields(known: Training, asked: Training) -> list[str]:
    """Name the fields that differ, as ``training.optimizer.decaySteps``."""
    before, after = (of.model_dump(mode="json", by_alias=True) for of in (known, asked))
    return [field for field, _, _ in differences("training", before, after)]


def extension_words(known: Training, asked: Training, *, after_step: int) -> str:
    """Say what a change of the training makes of a run."""
    before, after = (of.model_dump(mode="json", by_alias=True) for of in (known, asked))
    found = differences("training", before, after)
    changes = "; ".join(f"spec.{field}: {json.dumps(old)} -> {json.dumps(new)}" for field, old, new in found)
    if known.epochs is not None and asked.epochs is not None and known.epochs != asked.epochs:
        verb = "extends" if asked.epochs > known.epochs else "shortens"
        return f"{verb} the run from {known.epochs} to {asked.epochs} epochs: {changes}"
    if asked.steps == known.steps or asked.steps is None or known.steps is None:
        return f"changes the end of the run, after step {after_step}: {changes}"
    verb = "extends" if asked.steps > known.steps else "shortens"
    return f"{verb} the run from step {known.steps} to {asked.steps}: {changes}"


def _check_field(field: str, known: Training) -> None:
    match = END.fullmatch(field)
    stage = None if match is None else match[3]
    if match is None or (stage is not None and int(stage) != len(known.stages) - 1):
        raise InvalidConfigError(
            f"{field} may not change in a run that has begun: only its end may, by steps or epochs, decaySteps and "
            "finalLearningRate, and the same of the last stage; begin a new job by spec.startFrom",
            field=f"spec.{field}",
        )


def _check_rates(spec: TrainingJobSpec, known: Training, asked: Training, *, after_step: int) -> None:
    before, after = (
        (_schedule(of.training), curriculum_stages(of), of.training.steps_known)
        for of in (spec.model_copy(update={"training": training}) for training in (known, asked))
    )
    for step in range(max(1, after_step - COMPARED_STEPS_MAX + 1), after_step + 1):
        (old, new) = (rate_at(step, usual, stages, steps=steps) for usual, stages, steps in (before, after))
        if old != new:
            whole = before[0].schedule == COSINE and not known.optimizer.decay_steps
            why = "a cosine without decaySteps falls over the whole run" if whole else "its decay has begun"
            raise InvalidConfigError(
                f"training: the learning rate of step {step} would change from {old:.6g} to {new:.6g}, and step "
                f"{after_step} is trained or being trained: {why}; choose an end whose decay begins after step "
                f"{after_step}, or begin a new job by spec.startFrom at a checkpoint before step {step}",
                field="spec.training.steps, or decaySteps and finalLearningRate",
            )


def _schedule(training: Training) -> RateSchedule:
    of = training.optimizer
    return RateSchedule(
        learning_rate=float(of.learning_rate),
        final_learning_rate=float(of.final_learning_rate),
        schedule=of.schedule,
        warmup_steps=of.warmup_steps,
        decay_steps=of.decay_steps,
    )
