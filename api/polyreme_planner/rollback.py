"""Rollback after a spike of the loss: where the next attempt resumes, and which data it skips.

Samples of a window of the order are packed together and shuffled, so whole windows are skipped: those with suspected
steps. The entry takes effect where the first of them began, as if the job had been given it from the beginning.
"""

from __future__ import annotations

import bisect
import dataclasses

from polyreme_api.job.data import SCHEDULE_MAX, SKIP_STEPS_MAX, SourceWeight
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import ROLLBACKS_MAX, AppendedChange, MixtureRecord, Rejection
from polyreme_planner.curriculum import scored_steps
from polyreme_planner.mixture import Segment, segments_of, window_steps

SUSPECTED_STEPS = 8
"""Steps whose data are suspected: that of the spike and those before it."""
IN_A_ROW_MAX = 3
"""Rollbacks that may follow each other before training has passed the last spike by a window of the loss."""


def rejection_of(
    spec: TrainingJobSpec, record: MixtureRecord, *, attempt: int, step: int, why: str, begun_after: int = 0
) -> Rejection | None:
    """Return the rollback that answers a spike; None if no data can be skipped for it.

    That is so in the first window after the weights or packs have changed, since an entry skips what the weights before
    it would draw, in a window that another run has begun, and in a stage whose pairs were scored when it began.

    Args:
        spec: The job's specification.
        record: Mixture that the attempt trains by.
        attempt: The attempt.
        step: Step of the spike.
        why: The spike, for people.
        begun_after: Last step of the other run that the job starts from; 0 without one.
    """
    segments = segments_of(spec, record)
    at = bisect.bisect_right(segments, step, key=lambda segment: segment.first_step) - 1
    before, segment, following = segments[at - 1 : at], segments[at], segments[at + 1 : at + 2]
    steps = window_steps(segment.packs_per_step or spec.training.packs_per_step)
    earliest = segment.first_step + (0 if any(_draws_alike(of, segment) for of in before) else steps)
    suspected = max(earliest, step - SUSPECTED_STEPS + 1)
    first = suspected - (suspected - segment.first_step) % steps
    end = min([step + steps - (step - segment.first_step) % steps, *(later.first_step for later in following)])
    scored = any(begin <= first <= last for begin, last in scored_steps(spec))
    # An entry restarts the turns of sources, so the border of what is skipped again lies a few samples elsewhere.
    length = end - first + (1 if first == segment.first_step else 0)
    skipped = sum(change.skip_steps for change in record.changes if change.step == first)
    full = len(record.changes) >= SCHEDULE_MAX + ROLLBACKS_MAX or skipped + length > SKIP_STEPS_MAX
    if step < earliest or first <= begun_after or scored or full:
        return None
    return Rejection(
        attempt=attempt,
        spike_step=step,
        after_step=max(0, min(first, step - spec.health.loss.window_steps) - 1),
        from_step=first,
        skip_steps=length,
        why=why,
    )


def _draws_alike(before: Segment, after: Segment) -> bool:
    same = dataclasses.replace(before, first_step=after.first_step, skip_steps=after.skip_steps)
    return same == after


def rollbacks_in_a_row(record: MixtureRecord, *, step: int, window_steps: int) -> int:
    """Count the newest rollbacks without training that passed the spike by a window of the loss."""
    count, latest = 0, step
    for rejection in sorted(record.rejections, key=lambda rejection: rejection.attempt, reverse=True):
        if latest > rejection.spike_step + window_steps:
            break
        count, latest = count + 1, rejection.spike_step
    return count


def with_rejection(spec: TrainingJobSpec, record: MixtureRecord, rejection: Rejection) -> MixtureRecord:
    """Return a mixture with the change that answers a spike: once, however often it is asked for."""
    if rejection.attempt in {known.attempt for known in record.rejections}:
        return record
    step = rejection.from_step
    weights = [segment.weights for segment in segments_of(spec, record) if segment.first_step <= step][-1]
    change = AppendedChange(
        from_step=step,
        step=step,
        weights=tuple(
            SourceWeight(source=source.name, weight=weight)
            for source, weight in zip(spec.data.sources, weights, strict=True)
        ),
        skip_steps=rejection.skip_steps,
        rejection=rejection,
    )
    changes = sorted((*record.changes, change), key=lambda change: change.step)
    return record.model_copy(update={"changes": tuple(changes)})
