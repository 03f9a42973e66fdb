"""Mixture of a run by step: its segments, the windows in which samples are ordered, and where appended changes begin.

A segment is a run of steps with the same weights and packs. The samples of a window are packed together, so a change
of the weights inside it would change all of its steps. A change that is appended to a job that runs therefore waits
for the next window: no earlier step is altered (ADR 40).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.data import SKIP_STEPS_MAX, MixtureChange
from polyreme_api.job.model import Training
from polyreme_api.job.schedule import first_steps, schedule_faults
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import AppendedChange, MixtureRecord
from polyreme_planner.curriculum import packs_of_stages, scored_steps
from polyreme_planner.extension import Count, extended, extension_words, uncounted

WINDOW_PACKS = 256
"""Packs that are filled together; more fill better (99.9 % at 4,096 samples a window) and cost more at once."""
STEPS_AHEAD_MAX = 8
"""Steps after the one that is trained that any rank or data engine may have looked at already; what reads ahead keeps
below it. A change that is fixed while ranks train takes effect later."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps with the same weights, and the same packs."""

    first_step: int
    """Counts from 1."""
    weights: tuple[int, ...]
    packs_per_step: int | None = None
    """None: the plan's."""
    pack_tokens: int | None = None
    """None: the plan's."""
    answer_room: int = 0
    """Tokens that are left free for each sample in a pack: the model's own answers take them."""
    skip_steps: int = 0
    """Steps of the segment before whose data are passed over where this one begins."""


def mixture_changes(spec: TrainingJobSpec, record: MixtureRecord | None = None) -> tuple[MixtureChange, ...]:
    """Return all changes of the weights by rising step, each from the step on at which it takes effect.

    Args:
        spec: The job's specification.
        record: Changes that an attempt trains by; None: all of ``data.schedule`` that can be applied, at their steps.
    """
    faults = schedule_faults(spec.data, spec.training)
    known = spec.data.schedule if record is None else record.base
    changes = {change.from_step: change for change in known if change.from_step not in faults}
    changes |= {change.from_step: change for change in _of_stages(spec)}
    # Two changes that waited for the same window: the weights of the later one, and what both pass over. Older
    # records may hold more than the limit.
    for appended in () if record is None else record.changes:
        before = changes.get(appended.step)
        skipped = appended.skip_steps + (0 if before is None else before.skip_steps)
        changes[appended.step] = MixtureChange(
            from_step=appended.step, weights=list(appended.weights), skip_steps=min(SKIP_STEPS_MAX, skipped)
        )
    return tuple(changes[step] for step in sorted(changes))


def segments_of(spec: TrainingJobSpec, record: MixtureRecord | None = None) -> tuple[Segment, ...]:
    """Return the weights of the sources by step, in the order of the sources, and the packs of each stage.

    Args:
        spec: The job's specification.
        record: As in ``mixture_changes``.
    """
    names = [source.name for source in spec.data.sources]
    weights = {1: tuple(source.weight for source in spec.data.sources)}
    skips = {}
    for change in mixture_changes(spec, record):
        weights[change.from_step], skips[change.from_step] = weights_of(change, names), change.skip_steps
    packs = {of.first_step: of for of in packs_of_stages(spec)}
    segments: list[Segment] = []
    packed = packs[1]
    for first_step in sorted({*weights, *packs}):
        before, packed = packed, packs.get(first_step, packed)
        # Stages whose steps are packed alike have no border between them.
        if first_step in weights or before.form != packed.form:
            weighed = weights.get(first_step) or segments[-1].weights
            segments.append(
                Segment(
                    first_step=first_step,
                    weights=weighed,
                    packs_per_step=packed.per_step,
                    pack_tokens=packed.tokens,
                    answer_room=packed.answer_room,
                    skip_steps=skips.get(first_step, 0),
                )
            )
    return tuple(segments)


def weights_of(change: MixtureChange | AppendedChange, names: Sequence[str]) -> tuple[int, ...]:
    """Return a change's weights in the order of the sources."""
    given = {weight.source: weight.weight for weight in change.weights}
    return tuple(given.get(name, 0) for name in names)


def window_steps(packs_per_step: int, window_packs: int = WINDOW_PACKS) -> int:
    """Return the steps of a window that no segment's end cuts short."""
    return max(1, window_packs // packs_per_step)


def window_border(spec: TrainingJobSpec, segments: Sequence[Segment], step: int) -> int:
    """Return the first step from ``step`` on with which a window begins."""
    at = bisect.bisect_right(segments, step, key=lambda segment: segment.first_step) - 1
    segment = segments[at]
    steps = window_steps(segment.packs_per_step or spec.training.packs_per_step)
    border = segment.first_step + -(-(step - segment.first_step) // steps) * steps
    return min([border, *(later.first_step for later in segments[at + 1 : at + 2])])


def first_mixture(spec: TrainingJobSpec, *, entries: int | None = None, resume_step: int = 0) -> MixtureRecord:
    """Return the mixture of the first attempt that has a record: what the schedule has takes effect at its step.

    An entry that can't be applied was appended since the job was found to be in order: it is ignored, and what follows
    it was appended too.

    Args:
        spec: The job's specification.
        entries: Entries that were known from the beginning, if earlier attempts have no record; None: all.
        resume_step: Last step before the attempt's first.
    """
    faults = schedule_faults(spec.data, spec.training)
    schedule = spec.data.schedule[:entries]
    count = next((at for at, change in enumerate(schedule) if change.from_step in faults), len(schedule))
    return next_mixture(spec, MixtureRecord(base=tuple(schedule[:count]), read=count), after_step=resume_step)


def next_mixture(
    spec: TrainingJobSpec, known: MixtureRecord, *, after_step: int, count: Count = uncounted
) -> MixtureRecord:
    """Return the mixture that follows a known one: with the entries appended since.

    Each of these takes effect with the first window that begins neither before its step nor before ``after_step + 1``,
    nor before the entry ahead of it takes effect; one window later if both have too many steps to pass over. It is
    ignored if it can't be applied, if a curriculum stage has set other weights by then, or if it would change the
    pairs of a stage of preferences that has begun.

    Args:
        spec: The job's specification.
        known: Mixture of the attempt before, or that the attempt trains by so far.
        after_step: Newest step that may have been read already: for a new attempt, the one that it resumes from.
        count: Counts the steps of epochs.
    """
    faults = schedule_faults(spec.data, spec.training)
    # A border between two windows stays one when a change begins there, so all borders follow from what is known.
    segments, stages = segments_of(spec, known), [change.from_step for change in _of_stages(spec)]
    changes, preferring = list(known.changes), scored_steps(spec)
    for entry in spec.data.schedule[known.read :]:
        if entry.from_step in faults:
            continue
        # Not before the entry ahead of it: that may wait for a step of history that was lost since.
        least = max([entry.from_step, after_step + 1, *(change.step for change in changes[-1:])])
        step = window_border(spec, segments, least)
        there = sum(change.skip_steps for change in changes if change.step == step)
        if entry.skip_steps and there + entry.skip_steps > SKIP_STEPS_MAX:
            step = window_border(spec, segments, step + 1)
        # The pairs of a stage are scored when it begins, under a model that is then gone: no others may come in.
        scored = any(first <= step <= last and first <= after_step + 1 for first, last in preferring)
        if not scored and not any(entry.from_step < stage <= step for stage in stages):
            weights = tuple(entry.weights)
            changes.append(
                AppendedChange(from_step=entry.from_step, step=step, weights=weights, skip_steps=entry.skip_steps)
            )
    read = max(known.read, len(spec.data.schedule))
    training = next_training(spec, known, after_step=after_step, count=count)
    return known.model_copy(update={"changes": tuple(changes), "read": read, "training": training})


def next_training(
    spec: TrainingJobSpec, known: MixtureRecord, *, after_step: int, count: Count = uncounted
) -> Training | None:
    """Return the training that follows a known one: that of the spec, unless it would alter a trained step.

    Args:
        spec: The job's specification.
        known: As in ``next_mixture``.
        after_step: As in ``next_mixture``.
        count: As in ``extended``.
    """
    if known.training is None:
        return spec.training if "training" in spec.model_fields_set else None
    try:
        return extended(spec, known.training, after_step=after_step, count=count)
    except InvalidConfigError:
        return known.training


def training_words(
    spec: TrainingJobSpec, known: MixtureRecord, *, after_step: int, count: Count = uncounted
) -> list[str]:
    """Say in a sentence what ``next_training`` makes of a changed training; none: it is the same."""
    if known.training is None or spec.training == known.training:
        return []
    try:
        extended(spec, known.training, after_step=after_step, count=count)
    except InvalidConfigError as error:
        of = known.training
        end = f"step {of.steps}" if of.epochs is None else f"epoch {of.epochs}"
        return [f"the changed training is ignored, the run keeps its end at {end}: {error}"]
    return [extension_words(known.training, spec.training, after_step=after_step)]


def in_force(spec: TrainingJobSpec, record: MixtureRecord | None) -> TrainingJobSpec:
    """Return a job's specification with the training that an attempt is held to."""
    if record is None or record.training is None:
        return spec
    return spec.model_copy(update={"training": record.training})


def with_steps(spec: TrainingJobSpec, steps: int) -> TrainingJobSpec:
    """Return a job's specification with the steps that were counted for its epochs."""
    return spec.model_copy(update={"training": spec.training.with_steps(steps)})


def restored_mixture(spec: TrainingJobSpec, summary: Mapping[str, Any]) -> MixtureRecord | None:
    """Return a record by its summary and the schedule it was made from; None if they do not fit each other."""
    by_step = {entry.from_step: entry for entry in spec.data.schedule}
    try:
        changes = [
            {
                "fromStep": from_step,
                "step": step,
                "weights": by_step[from_step].weights,
                "skipSteps": by_step[from_step].skip_steps,
            }
            for from_step, step in summary["changes"]
        ]
        base = spec.data.schedule[: summary["base"]]
        record = MixtureRecord.model_validate({"base": base, "changes": changes, "read": summary["read"]})
    except (KeyError, TypeError, ValueError):
        return None
    return record if len(record.base) == summary["base"] else None


def _of_stages(spec: TrainingJobSpec) -> list[MixtureChange]:
    stages = spec.training.stages
    return [
        MixtureChange(from_step=first, weights=stage.weights)
        for first, stage in zip(first_steps(stages), stages, strict=True)
        if stage.weights
    ]
