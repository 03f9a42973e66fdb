"""Outcome of a run, as the command prints it: a row of figures and an exit code."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.report.run_report import figures, verdict
from polyreme.report.run_times import run_times
from polyreme.report.write import REPORT_NAME
from polyreme.run_files.data import steps_of
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import RunRecords, checkpoint_url
from polyreme.run_files.timeline import Moment
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJob
from polyreme_api.progress import ALL_SETS
from polyreme_launcher.urls import checkpoint_folder
from polyreme_operator.types.views import is_paused
from polyreme_system.files import read_json

_CODES = {
    "Misconfigured": ExitCode.USAGE,
    "EnvironmentFailed": ExitCode.ENVIRONMENT,
    "DataDamaged": ExitCode.DATA_DAMAGED,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What ``polyreme run`` prints at the end."""

    row: dict[str, Any]
    exit_code: ExitCode

    def to_row(self) -> dict[str, Any]:
        """Return the row for the table or JSON."""
        return self.row


def outcome_of(
    run: RunDirectory, job: TrainingJob, records: RunRecords, moments: Sequence[Moment], *, now: Moment
) -> RunOutcome:
    """Collect the state of a run."""
    state, message = verdict(job)
    head = figures(job, run_times(job, records, moments, now=now))
    history = records.history
    report = run.report / REPORT_NAME
    url = checkpoint_url(run, job)
    return RunOutcome(
        row={
            "name": run.name,
            "namespace": run.namespace,
            "state": state,
            "message": message,
            "finished": job.status.finished,
            "attempt": head.attempts,
            "attempts": head.attempts,
            "step": history[-1].step if history else 0,
            "steps": steps_of(run, job.spec) or None,
            "lossFirst": history[0].loss if history else None,
            "loss": history[-1].loss if history else None,
            "heldoutLoss": next((step.held_out[ALL_SETS] for step in reversed(history) if step.held_out), None),
            "heldoutExactMatchRatio": head.held_out_ratio,
            "heldoutSamples": (records.evaluation or {}).get("samples"),
            "goodputRatio": head.goodput,
            "tokensPerSecond": head.tokens_per_second,
            "restartSeconds": head.restart_s,
            "wallSeconds": head.wall_s,
            "deadLetters": (letters := dead_letters(read_json(run.data_report) or {})),
            "deadLetterWords": "; ".join(dead_letter_words(letters)),
            "checkpoints": str(checkpoint_folder(url) or url),
            "export": str(run.export) if run.export.exists() else None,
            "report": str(report) if report.exists() else None,
        },
        exit_code=exit_code_of(job),
    )


def dead_letters(data: Mapping[str, Any]) -> dict[str, int]:
    """Count the records of each dataset that could not be used, from what the data pipeline reports."""
    counts: Counter[str] = Counter()
    for row in data.get("stages", ()):
        counts[row["dataset"]] += row["deadLetters"]
    return {dataset: count for dataset, count in counts.items() if count}


def dead_letter_words(counts: Mapping[str, int]) -> list[str]:
    """Say which datasets have records that could not be used, and which command shows them."""
    return [
        f"{count:,} record{'' if count == 1 else 's'} of {dataset} could not be used: polyreme data show {dataset}"
        for dataset, count in counts.items()
    ]


def exit_code_of(job: TrainingJob) -> ExitCode:
    """Choose the exit code: success, failure by its reason, or stopped and resumable."""
    if job.status.is_true("Succeeded"):
        return ExitCode.OK
    failed = job.status.condition("Failed")
    if failed is not None and failed.status == "True":
        return _CODES.get(failed.reason, ExitCode.RUN_FAILED)
    paused = is_paused(job.status, job.metadata.generation)
    return ExitCode.RUN_FAILED if paused else ExitCode.CANCELLED
