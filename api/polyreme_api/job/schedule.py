"""Rules of ``data.schedule`` that name other parts of a job: sources, stages, how soon the weights repeat."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from polyreme_api.job.data import Data, MixtureChange
from polyreme_api.job.model import Stage, Training

PERIOD_MAX = 1_048_576
"""Most samples after which the weights of a mixture repeat."""


def first_steps(stages: Sequence[Stage]) -> list[int]:
    """Return the first step of each curriculum stage."""
    return list(itertools.accumulate((stage.steps for stage in stages), initial=1))[: len(stages)]


def schedule_faults(data: Data, training: Training) -> dict[int, str]:
    """Return what is wrong with each change of the weights that can't be applied, by its ``fromStep``.

    A new job with such a change is refused. A change that was appended to a job that has run is ignored instead:
    nothing can take it away again, and the job must not fail by it.
    """
    names = [source.name for source in data.sources]
    stages = zip(first_steps(training.stages), training.stages, strict=True)
    weighed = {first: stage.name for first, stage in stages if stage.weights}
    found = {change.from_step: _fault(change, names, weighed) for change in data.schedule}
    return {step: fault for step, fault in found.items() if fault}


def check_schedule(data: Data, training: Training) -> None:
    """Refuse a schedule with a change that can't be applied.

    Raises:
        ValueError: Naming the first one.
    """
    if (fault := next(iter(schedule_faults(data, training).values()), None)) is not None:
        raise ValueError(fault)


def _fault(change: MixtureChange, names: Collection[str], stages: Mapping[int, str]) -> str:
    step = change.from_step
    counts = Counter(weight.source for weight in change.weights)
    if doubled := sorted(name for name, count in counts.items() if count > 1):
        return f"data.schedule: fromStep {step} weighs {doubled[0]!r} twice; drop one"
    known = set(names)
    if strange := [name for name in counts if name not in known]:
        return (
            f"data.schedule: fromStep {step} weighs source {strange[0]!r}, sources are {', '.join(names)}; "
            "change weights[].source"
        )
    if not any(weight.weight for weight in change.weights):
        return f"data.schedule: every weight from step {step} on is 0; raise one"
    divisor = math.gcd(*(weight.weight for weight in change.weights))
    if (period := sum(weight.weight for weight in change.weights) // divisor) > PERIOD_MAX:
        return (
            f"data.schedule: weights from step {step} on repeat only after {period} samples, expected at most "
            f"{PERIOD_MAX}; use smaller or rounder weights"
        )
    if change.skip_steps and step == 1:
        return (
            f"data.schedule: skipSteps {change.skip_steps} at fromStep 1 has no weights before it; drop it, or name a "
            "later step"
        )
    if step in stages:
        return (
            f"training.stages: {stages[step]!r} gives weights from step {step} on, and so does data.schedule; "
            "drop one of them"
        )
    return ""
