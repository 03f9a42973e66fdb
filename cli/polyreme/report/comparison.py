"""Comparison of runs on this machine: the fields of the spec that differ, and figures side by side."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.report.run_report import figures
from polyreme.report.run_times import run_times
from polyreme.run_files.data import steps_of
from polyreme.run_files.logs import is_served
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import RunRecords, checkpoint_url, read_records_at
from polyreme.run_files.timeline import Moment, Timeline, read_timeline
from polyreme_api.clock import Clock
from polyreme_api.differences import leaves
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import column_of, held_out_losses
from polyreme_datahub_service.stored_job import read_stored_job
from polyreme_system.files import read_json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run as a comparison shows it."""

    spec: Mapping[str, Any]
    """Leaves of the spec with defaults written out, by field."""
    figures: Mapping[str, Any]


def read_run(run: RunDirectory, clock: Clock) -> ComparedRun:
    """Read a run from its folder and its checkpoint root.

    Raises:
        InvalidConfigError: If its stored job can't be read.
        StoreFailedError: If the store of its checkpoints stays away.
    """
    job = with_status(run, read_stored_job(run.job_file))
    return compared(run, job, read_records_at(checkpoint_url(run, job)), clock)


def compared(run: RunDirectory, job: TrainingJob, records: RunRecords, clock: Clock) -> ComparedRun:
    """Return a run as a comparison shows it, by its job with its status and by what its ranks left."""
    history = records.history
    head = figures(job, run_times(job, records, read_timeline(run.path), now=end_of_run(run, records, clock)))
    return ComparedRun(
        spec=dict(leaves("spec", job.spec.model_dump(mode="json", by_alias=True))),
        figures={
            "attempts": head.attempts,
            "step": history[-1].step if history else 0,
            "steps": steps_of(run, job.spec) or None,
            **losses_of(history),
            "heldoutExactMatchRatio": head.held_out_ratio,
            "objective": dict(history[-1].objective) if history else {},
            "goodputRatio": head.goodput,
            "tokensPerSecond": head.tokens_per_second,
            "wallSeconds": head.wall_s,
        },
    )


def losses_of(history: Sequence[StepRecord]) -> dict[str, float | None]:
    """Return the last and the least loss of steps, and of their held-out losses."""
    held_out = [loss for _, loss in held_out_losses(history)]
    losses = column_of(history, "loss")
    return {
        "loss": losses[-1] if losses else None,
        "bestLoss": min(losses, default=None),
        "heldoutLoss": held_out[-1] if held_out else None,
        "bestHeldoutLoss": min(held_out, default=None),
    }


def differing(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Return the fields of the specs that differ, each with its value in every run; None: the run has no such field."""
    fields = dict.fromkeys(field for run in runs for field in run.spec)
    values = {field: [run.spec.get(field) for run in runs] for field in fields}
    return {field: each for field, each in values.items() if any(value != each[0] for value in each)}


def with_status(run: RunDirectory, job: TrainingJob) -> TrainingJob:
    """Add the status that the serving process wrote last; without one the job has not begun."""
    status = (read_json(run.state_file) or {}).get("status")
    return parse_job(job.to_object() | {"status": status}) if status else job


def end_of_run(run: RunDirectory, records: RunRecords, clock: Clock) -> Moment:
    """Return the present of a run that is served, and of others the last that is known of them."""
    if is_served(run):
        return Timeline(run.path, clock).now()
    moments = read_timeline(run.path)
    last = moments[-1] if moments else Moment(at_s=clock.now_s(), kind="now", attempt=0)
    ends = (
        zip(column_of(steps, "ended_at_s"), column_of(steps, "ended_steady_s"), strict=True)
        for steps in records.steps.values()
    )
    at_s, steady_s = max(itertools.chain.from_iterable(ends), key=operator.itemgetter(0), default=(last.at_s, 0.0))
    if at_s <= last.at_s:
        return dataclasses.replace(last, kind="now")
    return dataclasses.replace(last, kind="now", at_s=at_s, steady_s=steady_s)
