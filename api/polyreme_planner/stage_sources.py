"""Check that each stage of a run draws from records of the kind that its objective trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job.data import Source
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_planner.curriculum import CurriculumStage, curriculum_stages
from polyreme_planner.mixture import Segment


def check_sources(spec: TrainingJobSpec, segments: Sequence[Segment], *, preferences: Sequence[bool]) -> None:
    """Refuse a stage that draws from records of another kind, or from augmented pairs whose scores are cached.

    Args:
        spec: The job's specification.
        segments: Weights of its sources by step.
        preferences: Whether each source holds preferences.

    Raises:
        InvalidConfigError: Naming the stage and the source.
    """
    # Without stages the whole run is supervised; how long it is may not be known yet.
    stages = curriculum_stages(spec) if spec.training.stages else (CurriculumStage(steps=STEPS_MAX),)
    # The end of the last one may move.
    stages = (*stages[:-1], dataclasses.replace(stages[-1], steps=STEPS_MAX - stages[-1].first_step))
    for number, stage in enumerate(stages):
        wants = stage.objective.compares
        field = f"spec.training.stages[{number}].objective" if stage.name else "spec.training.stages"
        for at, source in enumerate(spec.data.sources):
            if not _draws(stage, segments, at):
                continue
            what = f"source {source.name!r} ({source.dataset})"
            if wants and not preferences[at]:
                raise InvalidConfigError(
                    f"stage {stage.name!r} trains on preferences, {what} has weight in its steps and holds none; give "
                    "it weight 0 there, or register prompts with a chosen and a rejected answer",
                    field=field,
                )
            if preferences[at] and not wants:
                raise InvalidConfigError(
                    f"{what} holds preferences and has weight in {f'stage {stage.name!r}' if stage.name else 'a run'} "
                    "whose objective takes no pairs; give it weight 0 there, or the stage objective kind: Preference",
                    field=field,
                )
            if stage.objective.scores_before and _is_augmented(spec, source):
                raise InvalidConfigError(
                    f"{what} is augmented, but stage {stage.name!r} scores each pair once under its reference; turn "
                    "augmentation off for it (augment: {} in spec.data.sources), or use reference.scores: Online",
                    field="spec.data.augment",
                )


def _is_augmented(spec: TrainingJobSpec, source: Source) -> bool:
    augment = spec.data.augment if source.augment is None else source.augment
    return augment is not None and any((augment.crop, augment.scale, augment.mirror, augment.color))


def _draws(stage: CurriculumStage, segments: Sequence[Segment], source: int) -> bool:
    """Tell whether a stage has a step in which a source has weight."""
    nexts = [segment.first_step for segment in segments[1:]]
    return any(
        segment.weights[source] and segment.first_step <= stage.last_step and following > stage.first_step
        for segment, following in zip(segments, [*nexts, stage.last_step + 1], strict=True)
    )
