"""Actions on a run: each is a command, which the page shows before it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from polyreme.run_files.paths import RunDirectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that a person may do to a run."""

    name: str
    """In its address."""
    title: str
    says: str
    """What it does, in one sentence."""
    arguments: Callable[[RunDirectory], list[str]]
    """Of ``polyreme``."""
    while_served: bool
    """Whether the run must be served, or must not be."""
    harmful: bool = False
    outlives: bool = False
    """Whether the command trains the run, and so must outlive the console."""

    def log(self, run: RunDirectory) -> Path | None:
        """Return the file of the command's output, for one that outlives the console."""
        return run_log(run) if self.outlives else None


def full_name(run: RunDirectory) -> str:
    """Write the name as commands take it."""
    return run.name if run.namespace == "default" else f"{run.namespace}/{run.name}"


def run_log(run: RunDirectory) -> Path:
    """Return the file with the output of the command that trains a run and was started here."""
    return console_folder(run) / f"{run.name}.log"


def submitted_job(run: RunDirectory) -> Path:
    """Return the file of a job that was submitted here."""
    return console_folder(run) / f"{run.name}.yaml"


def console_folder(run: RunDirectory) -> Path:
    """Return the folder of what was started here, outside the runs' own: a run's folder may be deleted."""
    return run.path.parents[2] / "console" / "jobs" / run.namespace


ACTIONS = (
    Action(
        name="stop",
        title="Suspend",
        says="Saves a checkpoint and stops; the run can be resumed.",
        arguments=lambda run: ["runs", "stop", full_name(run)],
        while_served=True,
    ),
    Action(
        name="resume",
        title="Resume",
        says="Continues from the newest checkpoint, with the job as it was stored.",
        arguments=lambda run: ["run", str(run.job_file)],
        while_served=False,
        outlives=True,
    ),
    Action(
        name="delete",
        title="Delete",
        says="Deletes logs, report and export of the run. Its checkpoints stay.",
        arguments=lambda run: ["runs", "rm", full_name(run), "--yes"],
        while_served=False,
        harmful=True,
    ),
)
