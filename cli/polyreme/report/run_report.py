"""From a run's folder to the values of its report and its figures."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyreme.report.data import (
    AnsweredPage,
    CheckpointRow,
    DeadLetterRow,
    ExpertLoads,
    Figures,
    HeldOutSet,
    LayerLoad,
    MixtureWeights,
    ReportData,
    SourceVisits,
    StageRow,
    StepPacks,
    TrainedStage,
)
from polyreme.report.run_times import RunTimes, run_times
from polyreme.report.spikes import spikes_of
from polyreme.run_files.data import steps_of
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import RunRecords, checkpoint_url, read_start
from polyreme.run_files.timeline import Moment
from polyreme_api.fields import Condition
from polyreme_api.job import TrainingJob
from polyreme_api.job.accounting import goodput_of
from polyreme_api.job.data import Data
from polyreme_api.mixture import MixtureRecord
from polyreme_api.step_columns import column_of
from polyreme_operator.types.reasons import Reason
from polyreme_planner.curriculum import curriculum_stages
from polyreme_planner.extension import extension_words
from polyreme_planner.mixture import mixture_changes
from polyreme_planner.plan import Plan, plan_for
from polyreme_system.files import read_json

if TYPE_CHECKING:
    from polyreme_datahub.loader.order.outlook import SegmentOutlook

PAGES_SHOWN_MAX = 24
"""Held-out pages in the report, wrong ones first."""
SPIKES_SHOWN_MAX = 3
"""Spikes whose packs are in the report: the last ones."""
_WORDS = {"Suspended": "Stopped", "PodsReady": "Starting", "Admitted": "Starting", "Queued": "Waiting"}
"""How conditions are called where they are not called by their type."""
_SENTENCES = {
    "Starting": "starting the ranks",
    "WaitingForData": "waiting for data",
    "Loading": "loading the model",
    "Scoring": "scoring pairs under the reference",
    "Training": "training",
    "Evaluating": "answering the held-out questions",
    "Exporting": "finishing",
    "Suspended": "stopped on request; run polyreme run with the same file to continue",
}
"""What reasons mean whose conditions bear no message."""
PACKAGES = ("polyreme", "torch", "numpy", "pydantic", "sqlalchemy", "obstore")


def gather(
    run: RunDirectory,
    job: TrainingJob,
    records: RunRecords,
    moments: Sequence[Moment],
    *,
    picture: Callable[[str], bytes],
    outlook: Callable[[int], Sequence[SegmentOutlook]],
    packs: Callable[[int, int], StepPacks | None],
    now: Moment,
) -> ReportData:
    """Collect a run's report.

    Args:
        run: The run's folder.
        job: The job with its newest status.
        records: What the ranks left.
        moments: What the serving process saw of the attempts.
        picture: Returns the PNG of a held-out page by its digest, which is empty for a sample of text alone; nothing
            where there is none.
        outlook: Returns what the sources give up to a step, with visits.
        packs: Returns what a step of an attempt trained on; None where that can't be read.
        now: The present.
    """
    times = run_times(job, records, moments, now=now)
    records, history, discarded = times.records, times.records.history, times.records.discarded
    data = read_json(run.data_report) or {}
    pages = list((records.evaluation or {}).get("pages", ()))
    outcome, reason = verdict(job)
    rejections = () if records.mixture is None else records.mixture.rejections
    spikes = sorted({(of.attempt, of.step) for of in spikes_of((history, discarded), rejections)})
    spike_packs = [packs(attempt, step) for attempt, step in spikes[-SPIKES_SHOWN_MAX:]]
    return ReportData(
        title=run.name if run.namespace == "default" else f"{run.namespace}/{run.name}",
        outcome=outcome,
        reason=reason,
        written_s=now.at_s,
        figures=figures(job, times),
        job_yaml=run.job_file.read_text(encoding="utf-8") if run.job_file.exists() else "",
        plan=_plan(job),
        steps_planned=steps_of(run, job.spec),
        steps=history,
        thrown_away=discarded,
        attempts=times.attempts,
        course=_course(run, job, records),
        time_shares=times.shares,
        accounting=job.status.accounting,
        training_stages=_training_stages(job),
        experts=_experts(records.routing),
        mixture=_mixture(job, records.mixture),
        rejections=rejections,
        spike_packs=[shown for shown in spike_packs if shown is not None],
        weights_are=_weights_are(job.spec.data),
        visits=_visits(outlook(history[-1].step) if history else ()),
        stages=[_stage(row) for row in data.get("stages", ())],
        damage=[moment.text for moment in moments if moment.kind == "damage"],
        dead_letters=[_dead_letter(row) for row in data.get("deadLetters", ())],
        held_out=_held_out(pages),
        pages=[_page(page, picture) for page in _chosen(pages)],
        checkpoints=[
            CheckpointRow(name=entry.name, size_bytes=entry.size_bytes, committed=entry.committed)
            for entry in records.checkpoints
        ],
        environment=_environment(),
    )


def _course(run: RunDirectory, job: TrainingJob, records: RunRecords) -> list[str]:
    """Say which checkpoint the run started from, and how its end was moved, by attempt."""
    started = read_start(checkpoint_url(run, job)) if job.spec.start_from is not None else ""
    trained = [(of, of.mixture.training) for of in records.points if of.mixture is not None and of.mixture.training]
    moved = [
        f"attempt {point.attempt} {extension_words(before, after, after_step=point.step)}"
        for (_, before), (point, after) in itertools.pairwise(trained)
        if before != after
    ]
    return [*([started] if started else []), *moved]


def _plan(job: TrainingJob) -> Plan:
    """Return the plan of the last attempt; of a job that never had one, the plan that it would get."""
    attempt = job.status.attempt
    return plan_for(job.spec) if attempt is None or not attempt.plan else Plan.from_json(attempt.plan)


def verdict(job: TrainingJob) -> tuple[str, str]:
    """Describe the job's state in one word and one sentence."""
    status = job.status
    suspended = status.condition("Suspended")
    if suspended is not None and not status.finished:
        if suspended.reason == "Suspending":
            return "Stopping", "stopping: the ranks save a checkpoint and exit"
        if suspended.status == "True" and not job.spec.suspend and suspended.reason != Reason.LOSS_SPIKES:
            return "Starting", "continuing"
    for kind in ("Succeeded", "Failed", "Suspended", "Restarting", "Running", "PodsReady", "Admitted", "Queued"):
        if (condition := status.condition(kind)) is not None and condition.status == "True":
            return _WORDS.get(kind, kind), _sentence(job, condition)
    if job.spec.suspend:
        return "Stopped", "suspended: spec.suspend is true"
    waiting = status.condition("Admitted") or status.condition("Queued")
    return ("Waiting", waiting.message or waiting.reason) if waiting else ("Starting", "starting up")


def _sentence(job: TrainingJob, condition: Condition) -> str:
    if condition.type == "Admitted":
        return f"starting {condition.message}"
    if condition.type == "PodsReady":
        # Once all workers have joined, the condition that the ranks do not run yet gives what they wait for.
        running = job.status.condition("Running")
        return _SENTENCES.get(running.reason if running else "", _SENTENCES["Starting"])
    words = condition.message or _SENTENCES.get(condition.reason, condition.reason)
    slow = job.status.condition("StragglersFound")
    if condition.type == "Running" and slow is not None and slow.status == "True":
        return f"{words}; {slow.message}"
    return words


def figures(job: TrainingJob, times: RunTimes) -> Figures:
    """Work the head figures out from what is on disk."""
    records, history = times.records, times.records.history
    trained_s, tokens = sum(column_of(history, "step_s")), sum(column_of(history, "tokens"))
    evaluation = records.evaluation or {}
    return Figures(
        wall_s=times.wall_s,
        attempts=max(len(records.points), job.status.attempt.number if job.status.attempt else 0),
        restart_s=times.restart_s,
        tokens_per_second=tokens / trained_s if trained_s else None,
        held_out_ratio=evaluation.get("exactMatchRatio"),
        goodput=goodput_of(job.status.accounting.table),
    )


def _mixture(job: TrainingJob, record: MixtureRecord | None) -> list[MixtureWeights]:
    first = MixtureWeights(step=1, weights={source.name: source.weight for source in job.spec.data.sources})
    changes = [
        MixtureWeights(
            step=change.from_step,
            weights={weight.source: weight.weight for weight in change.weights},
            skip_steps=change.skip_steps,
        )
        for change in mixture_changes(job.spec, record)
    ]
    return [first, *changes]


def _visits(rows: Sequence[SegmentOutlook]) -> list[SourceVisits]:
    return [
        SourceVisits(
            source=of.name,
            epochs=of.epochs,
            least=of.visits.least,
            most=of.visits.most,
            unseen=of.visits.unseen,
            exact=of.visits.exact,
        )
        for row in rows[-1:]
        for of in row.sources
        if of.visits is not None and (of.epochs or of.samples_ratio)
    ]


def _weights_are(data: Data) -> str:
    shares = f"shares of {data.weights_by.lower()}"
    if data.temperature is not None:
        return f"{shares} by the sizes of the sources, at temperature {data.temperature}"
    return "" if data.weights_by == "Samples" else shares


def _training_stages(job: TrainingJob) -> list[TrainedStage]:
    return [
        TrainedStage(
            name=stage.name,
            first_step=stage.first_step,
            last_step=stage.last_step,
            trains=stage.learns_alone,
        )
        for stage in curriculum_stages(job.spec)
        if stage.name
    ]


def _experts(table: Mapping[str, Any] | None) -> ExpertLoads | None:
    if not table:
        return None
    layers = [
        LayerLoad(
            layer=row["layer"], load=tuple(row["load"]), dropped=sum(row["dropped"]), entropy=float(row["entropy"])
        )
        for row in table["layers"]
    ]
    return ExpertLoads(first_step=table["fromStep"], last_step=table["step"], layers=layers) if layers else None


def _stage(row: Mapping[str, Any]) -> StageRow:
    return StageRow(
        dataset=row["dataset"],
        stage=row["stage"],
        processed=row["processed"],
        reused=row["reused"],
        dead_letters=row["deadLetters"],
        dropped=row.get("dropped", 0),
    )


def _dead_letter(row: Mapping[str, Any]) -> DeadLetterRow:
    error = f"{row['rule']}: {row['error']}"
    return DeadLetterRow(dataset=row["dataset"], stage=row["stage"], record=row["record"], error=error)


def _held_out(pages: Iterable[Mapping[str, Any]]) -> list[HeldOutSet]:
    sets: dict[str, list[bool]] = {}
    for page in pages:
        sets.setdefault(page["set"], []).append(bool(page["match"]))
    return [HeldOutSet(name=name, samples=len(marks), right=sum(marks)) for name, marks in sets.items()]


def _chosen(pages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    wrong = [page for page in pages if not page["match"]][: PAGES_SHOWN_MAX // 2]
    right = [page for page in pages if page["match"]]
    stride = max(1, len(right) // max(1, PAGES_SHOWN_MAX - len(wrong)))
    return [*wrong, *right[::stride][: PAGES_SHOWN_MAX - len(wrong)]]


def _page(page: Mapping[str, Any], picture: Callable[[str], bytes]) -> AnsweredPage:
    return AnsweredPage(
        png=picture(page["imageDigest"]),
        question=page["question"],
        expected=page["expected"],
        answer=page["answer"],
        right=bool(page["match"]),
        set_name=page["set"],
    )


def _environment() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        **versions,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
