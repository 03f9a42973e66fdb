"""``polyreme run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polyreme.commands.job_arguments import JobFiles, SetOption
from polyreme.local_run.fault_options import FORMS, parse_injection
from polyreme.local_run.signals import cancel_on_signals
from polyreme.run_files.paths import Home
from polyreme.views.formatting import short_weights
from polyreme.views.output import Format, OutputOption, emit, note
from polyreme_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from polyreme.local_run.outcome import RunOutcome
    from polyreme_api.job import TrainingJob


def run(
    context: typer.Context,
    job: JobFiles,
    settings: SetOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the old run is kept next to it as .previous.")
    ] = False,
    inject: Annotated[list[str] | None, typer.Option(help=f"Inject a failure: {FORMS}; may be repeated.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Devices that this machine offers.", show_default="enough")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes that this machine is divided into.")] = 1,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND:WHERE", help="Send steps to tensorboard:DIR or mlflow:URL; may be repeated."),
    ] = None,
    output: OutputOption = Format.TABLE,
) -> int:
    """Train a job on this machine, as a cluster would: pods become processes.

    Run the same command again to continue; a finished run is reported as such. Ctrl-C saves a checkpoint and stops; the
    run can be continued. Entries that were appended to data.schedule, and another end of the run (training.steps,
    decaySteps and finalLearningRate), are passed to the run, also while it trains; a finished run is extended.

    Examples:

      polyreme run manifests/samples/quickstart.yaml

      polyreme run job.yaml --set metadata.name=slow --set training.optimizer.learningRate=3e-4

      polyreme run base.yaml mine.yaml

      polyreme run job.yaml --inject kill-rank=1@130 --inject stop-rank=0@200

      polyreme run job.yaml --nodes 5 --inject slow-node=1

      polyreme run job.yaml --track tensorboard:./tensorboard --track mlflow:http://127.0.0.1:5000

      polyreme run job.yaml --fresh -o json
    """
    # Before the modules of a run are imported: Ctrl-C meanwhile must end the command as it does later.
    cancel_on_signals()
    from polyreme.job_overrides import load_merged
    from polyreme.local_run.session import SessionSettings, serve
    from polyreme.tracking.registry import live_target

    home: Home = context.obj
    described = load_merged(job, settings or ())
    if not fresh and _changed(home, described, output):
        return ExitCode.OK
    injections = [parse_injection(text) for text in inject or ()]
    trackers = tuple(live_target(text) for text in track or ())
    asked = SessionSettings(fresh=fresh, injections=tuple(injections), devices=devices, nodes=nodes, trackers=trackers)
    outcome = serve(home, described, asked)
    _emit(outcome, output)
    return outcome.exit_code


def _emit(outcome: RunOutcome, output: Format) -> None:
    emit(
        "Run",
        outcome.to_row(),
        output=output,
        columns=[
            ("run", "name"),
            ("state", "state"),
            ("why", "message"),
            ("attempts", "attempts"),
            ("steps", "step"),
            ("loss", "loss"),
            *([("held out", "heldoutLoss")] if outcome.row["heldoutLoss"] is not None else []),
            ("held-out correct", "heldoutExactMatchRatio"),
            ("goodput", "goodputRatio"),
            *([("dead letters", "deadLetterWords")] if outcome.row["deadLetters"] else []),
            ("checkpoints", "checkpoints"),
            ("export", "export"),
            ("report", "report"),
        ],
    )


def _changed(home: Home, job: TrainingJob, output: Format) -> bool:
    """Hand changes of the file to a run that is running; tell whether that was asked for."""
    from polyreme.local_run.running import change_running

    run = home.run(job.metadata.namespace, job.metadata.name)
    if (found := change_running(home, run, job)) is None:
        return False
    appended, words = found
    for sentence in words:
        note(f"run {run.name} is running: {sentence}")
    if not appended:
        return True
    note(
        f"run {run.name} is running: entries appended to its schedule: {len(appended)}; each applies from the next "
        "window of the order, at least eight steps ahead"
    )
    rows = [
        {
            "fromStep": change.from_step,
            "weights": short_weights({of.source: of.weight for of in change.weights}),
            "skipSteps": change.skip_steps,
        }
        for change in appended
    ]
    columns = [("from step", "fromStep"), ("weights", "weights"), ("steps skipped", "skipSteps")]
    emit("AppendedChanges", rows, output=output, columns=columns)
    return True
