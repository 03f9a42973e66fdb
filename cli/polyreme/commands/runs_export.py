"""``polyreme runs export``."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from polyreme.commands.runs import NameArgument, find
from polyreme.job_files import read_job
from polyreme.report.run_summary import describe
from polyreme.tracking.csv_file import STANDARD_OUTPUT
from polyreme.tracking.feed import Feed
from polyreme.tracking.history import SettledSteps, tracked_run
from polyreme.tracking.registry import EXPERIMENT, EXPERIMENT_VARIABLE, TRACKERS
from polyreme.views.output import Format, OutputOption, emit, note
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_system.files import read_json


def export(
    context: typer.Context,
    name: NameArgument,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write TensorBoard's event files below this folder.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URL", help="Send the run to this MLflow server.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line a step; - is standard output.")] = None,
    experiment: Annotated[str, typer.Option(help="Experiment in MLflow.", envvar=EXPERIMENT_VARIABLE)] = EXPERIMENT,
    output: OutputOption = Format.TABLE,
) -> None:
    """Export the steps of a run to TensorBoard, MLflow or a CSV file, each step once whatever attempts failed.

    A second export to the same place sends only what is new. Steps after the newest checkpoint of a run that has not
    finished may be trained again, so they are left out. Credentials of MLflow are read from MLFLOW_TRACKING_TOKEN, or
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Examples:

      polyreme runs export quickstart --tensorboard ./tensorboard

      polyreme runs export quickstart --mlflow http://127.0.0.1:5000 --experiment digits

      polyreme runs export quickstart --csv -
    """
    named = {"tensorboard": tensorboard, "mlflow": mlflow, "csv": csv}
    targets = {kind: os.fspath(where) for kind, where in named.items() if where is not None}
    if not targets:
        raise InvalidConfigError(
            "no place to export to, expected one or more", field="--tensorboard, --mlflow or --csv"
        )
    run = find(context.obj, name)
    trackers = {kind: TRACKERS[kind](where, experiment) for kind, where in targets.items()}
    job = read_job(run.job_file)
    steps = SettledSteps(run, job)
    points = steps.read(finished=bool((read_json(run.state_file) or {}).get("finished")))
    if not points:
        why = f"its {steps.unsettled} steps are in no checkpoint yet" if steps.unsettled else "it has trained none"
        raise NotFoundError(f"run {name!r} has no step to export: {why}", field="NAME")
    tracked = tracked_run(run, job, state=describe(run)["state"], attempts=steps.attempts)
    rows = []
    for kind, tracker in trackers.items():
        with contextlib.closing(tracker):
            sent = Feed(tracker, time.sleep).send(tracked, points)
        rows.append({"to": kind, "at": tracker.shown_at(), "steps": sent, "lastStep": points[-1].step})
    if steps.unsettled:
        note(f"{steps.unsettled} steps after the newest checkpoint are left out: they may be trained again")
    if targets.get("csv") != STANDARD_OUTPUT:
        columns = [("TO", "to"), ("NEW STEPS", "steps"), ("LAST STEP", "lastStep"), ("AT", "at")]
        emit("ExportList", rows, output=output, columns=columns)
