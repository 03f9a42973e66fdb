"""Curriculum stages of a run: what learns, how fast, at which positions, from which packs, by job and step alone.

Loader, trainer, planner, operator and report read them here, so that no two of them differ about a step (ADR 19).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from enum import StrEnum

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job.model import Stage
from polyreme_api.job.objective import Objective
from polyreme_api.job.schedule import first_steps
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import ModelShape


class Learner(StrEnum):
    """A part of the model that learns or is frozen as a whole."""

    TOWER = "Tower"
    PROJECTOR = "Projector"
    DECODER = "Decoder"
    """With embedding and head, and the routing biases."""


EVERYTHING = frozenset(Learner)
SUPERVISED = Objective()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnRate:
    """A curriculum stage's own learning rate; None is the optimizer's."""

    learning_rate: float | None = None
    final_learning_rate: float | None = None
    schedule: str | None = None
    warmup_steps: int = 0
    decay_steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumStage:
    """Consecutive steps of a run that train alike."""

    name: str = ""
    """Empty if the job names no stages."""
    first_step: int = 1
    steps: int
    objective: Objective = SUPERVISED
    """What it optimises."""
    learners: frozenset[Learner] = EVERYTHING
    rate: OwnRate | None = None
    """A schedule over this stage's steps; None: the optimizer's, over the run's."""
    rope_theta: float | None = None
    """Base of the decoder's rotary positions; None: the model's."""

    @property
    def learns_alone(self) -> tuple[Learner, ...]:
        """Parts that learn, in the order of the model; empty if all of them do."""
        return () if self.learners == EVERYTHING else tuple(part for part in Learner if part in self.learners)

    @property
    def last_step(self) -> int:
        """Its last step."""
        return self.first_step + self.steps - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """The packs of a step, and the curriculum stage that has them."""

    per_step: int
    tokens: int
    """Of one pack."""
    answer_room: int = 0
    """Tokens that are left free in it for each sample."""
    stage: str = ""
    """The first that has them; empty if the job names no stages."""
    first_step: int = 1

    @property
    def form(self) -> tuple[int, int, int]:
        """What samples are packed by."""
        return self.per_step, self.tokens, self.answer_room


def curriculum_stages(spec: TrainingJobSpec) -> tuple[CurriculumStage, ...]:
    """Return the curriculum stages of a run, at least one, each with all that it inherits."""
    training = spec.training
    if not training.stages:
        return (CurriculumStage(steps=training.steps or STEPS_MAX),)
    found: list[CurriculumStage] = []
    theta: float | None = None
    for first, stage in zip(first_steps(training.stages), training.stages, strict=True):
        theta = theta if stage.rope_theta is None else float(stage.rope_theta)
        found.append(
            CurriculumStage(
                name=stage.name,
                first_step=first,
                steps=stage.steps,
                objective=stage.objective or SUPERVISED,
                learners=frozenset(Learner(part) for part in stage.trains),
                rate=_own_rate(stage),
                rope_theta=theta,
            )
        )
    return tuple(found)


def scored_steps(spec: TrainingJobSpec) -> list[tuple[int, int]]:
    """Return first and last step of each stage whose pairs are scored before it; the last stage has no end."""
    stages = curriculum_stages(spec) if spec.training.stages else ()
    return [
        (stage.first_step, STEPS_MAX if stage is stages[-1] else stage.last_step)
        for stage in stages
        if stage.objective.scores_before
    ]


def stage_at(stages: Sequence[CurriculumStage], step: int) -> CurriculumStage:
    """Return the curriculum stage of a step; after the last step, the last one."""
    return next((stage for stage in stages if step <= stage.last_step), stages[-1])


def times_learned(stages: Sequence[CurriculumStage], step: int) -> dict[Learner, int]:
    """Return how often each part that learns in a step has learned, including this step."""
    return {
        learner: sum(
            max(0, min(stage.last_step, step) - stage.first_step + 1) for stage in stages if learner in stage.learners
        )
        for learner in Learner
        if learner in stage_at(stages, step).learners
    }


def shape_at(shape: ModelShape, stages: Sequence[CurriculumStage], step: int) -> ModelShape:
    """Return a model's shape as it is trained at a step: a curriculum stage may set another rotary theta."""
    theta = stage_at(stages, step).rope_theta
    if theta is None:
        return shape
    return dataclasses.replace(shape, decoder=dataclasses.replace(shape.decoder, rope_theta=theta))


def packs_of_stages(spec: TrainingJobSpec) -> tuple[Packs, ...]:
    """Return the packs of each curriculum stage, in order; of a job without stages, those of all steps."""
    training, tokens = spec.training, spec.data.sequence_tokens
    if not training.stages:
        return (Packs(per_step=training.packs_per_step, tokens=tokens),)
    return tuple(
        Packs(
            per_step=stage.packs_per_step or training.packs_per_step,
            tokens=stage.sequence_tokens or tokens,
            answer_room=0 if stage.objective is None else stage.objective.answer_room,
            stage=stage.name,
            first_step=first,
        )
        for first, stage in zip(first_steps(training.stages), training.stages, strict=True)
    )


def kinds_of_packs(spec: TrainingJobSpec) -> tuple[Packs, ...]:
    """Return the packs that differ, the longest first; every layout of the job must hold all of them."""
    found: dict[tuple[int, int], Packs] = {}
    for packs in packs_of_stages(spec):
        found.setdefault((packs.tokens, packs.per_step), packs)
    return tuple(packs for _, packs in sorted(found.items(), reverse=True))


def check_learners(spec: TrainingJobSpec, shape: ModelShape) -> None:
    """Refuse a curriculum stage in which nothing of the model would learn.

    Raises:
        InvalidConfigError: Naming the stage.
    """
    for stage in curriculum_stages(spec):
        if not shape.sees and Learner.DECODER not in stage.learners:
            raise InvalidConfigError(
                f"stage {stage.name!r} trains nothing: model {shape.name} is a decoder alone, "
                f"the stage trains only {', '.join(sorted(stage.learners))}; add Decoder",
                field="spec.training.stages[].trains",
            )


def check_answer_room(spec: TrainingJobSpec) -> None:
    """Refuse a stage whose answers leave no room for a prompt in its packs.

    Raises:
        InvalidConfigError: Naming the stage.
    """
    for number, packs in enumerate(packs_of_stages(spec)):
        if packs.answer_room >= packs.tokens:
            raise InvalidConfigError(
                f"stage {packs.stage!r} leaves no room for a prompt: its answers take samples x answerTokens = "
                f"{packs.answer_room} tokens, its packs have {packs.tokens}; raise sequenceTokens of the stage, or ask "
                "for fewer or shorter answers",
                field=f"spec.training.stages[{number}].sequenceTokens",
            )


def generation_layout(objectives: Iterable[Objective | None], *, world: int) -> Layout | None:
    """Return the layout in which answers are drawn, if it is another than training's."""
    own = (objective.generation for objective in objectives if objective is not None)
    found = next((each.parallelism for each in own if each is not None and each.parallelism is not None), None)
    return None if found is None else Layout(dp=world, ep=found.ep)


def check_generation(spec: TrainingJobSpec, shape: ModelShape, *, world: int) -> None:
    """Refuse a layout of draws that does not fit the ranks or the model.

    Raises:
        InvalidConfigError: Naming the field.
    """
    objectives = [stage.objective for stage in spec.training.stages or ()]
    layouts = {found: number for number, of in enumerate(objectives) if (found := generation_layout([of], world=world))}
    for layout, number in layouts.items():
        experts, field = shape.decoder.experts, f"spec.training.stages[{number}].objective.generation.parallelism"
        if world % layout.ep or experts % layout.ep:
            what = f"the model's {experts} experts" if world % layout.ep == 0 else f"the job's {world} ranks"
            raise InvalidConfigError(
                f"layout of generation does not fit: ep {layout.ep} does not divide {what}", field=f"{field}.ep"
            )
        if spec.training.adapters is not None:
            raise InvalidConfigError(
                "a layout of generation cannot be combined with adapters, whose frozen weights are not sent; leave it "
                "out",
                field=field,
            )
        if len(layouts) > 1:
            raise InvalidConfigError(
                f"stages draw answers in {len(layouts)} layouts: "
                f"{' and '.join(f'ep {each.ep}' for each in layouts)}; name the same in all of them",
                field=f"{field}.ep",
            )


def _own_rate(stage: Stage) -> OwnRate | None:
    said = stage.learning_rate, stage.final_learning_rate, stage.schedule, stage.warmup_steps, stage.decay_steps
    if all(value is None for value in said):
        return None
    peak, final, shape, warmup_steps, decay_steps = said
    return OwnRate(
        learning_rate=None if peak is None else float(peak),
        final_learning_rate=None if final is None else float(final),
        schedule=shape,
        warmup_steps=warmup_steps or 0,
        decay_steps=decay_steps or 0,
    )
