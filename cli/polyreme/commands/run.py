"""``polyreme run`` and ``polyreme validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from polyreme.local_run.fault_options import FORMS
from polyreme.run_files.paths import Home
from polyreme.views.formatting import size
from polyreme.views.output import Format, emit, note
from polyreme_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from polyreme_api.job import TrainingJob
    from polyreme_planner.curriculum import CurriculumStage, Packs

JobArgument = Annotated[Path, typer.Argument(help="YAML file with one TrainingJob; - reads standard input.")]
OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Output format.")]


def run(
    context: typer.Context,
    job: JobArgument,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the old run is kept next to it as .previous.")
    ] = False,
    inject: Annotated[list[str] | None, typer.Option(help=f"Inject a failure: {FORMS}; may be repeated.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Devices that this machine offers.", show_default="enough")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes that this machine is divided into.")] = 1,
    output: OutputOption = Format.TABLE,
) -> int:
    """Train a job on this machine, as a cluster would: pods become processes.

    Run the same file again to continue; a finished run is reported as such. Ctrl-C saves a checkpoint and stops; the
    run can be continued. Entries that were appended to data.schedule are passed to the run, also while it trains.

    Examples:

      polyreme run manifests/samples/quickstart.yaml

      polyreme run job.yaml --inject kill-rank=1@130 --inject stop-rank=0@200

      polyreme run job.yaml --nodes 5 --inject slow-node=1

      polyreme run job.yaml --fresh -o json
    """
    from polyreme.local_run.signals import cancel_on_signals

    cancel_on_signals()
    from polyreme.job_files import read_job
    from polyreme.local_run.fault_options import parse_injection
    from polyreme.local_run.session import SessionSettings, serve

    home: Home = context.obj
    described = read_job(job)
    if not fresh and _appended(home, described, output):
        return ExitCode.OK
    injections = [parse_injection(text) for text in inject or ()]
    settings = SessionSettings(fresh=fresh, injections=tuple(injections), devices=devices, nodes=nodes)
    outcome = serve(home, described, settings)
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
    return outcome.exit_code


def _appended(home: Home, job: TrainingJob, output: Format) -> bool:
    """Hand entries that were appended to the schedule to a run that is running; tell whether that was asked for."""
    from polyreme.local_run.running import append_schedule
    from polyreme.views.formatting import short_weights

    run = home.run(job.metadata.namespace, job.metadata.name)
    if (appended := append_schedule(run, job)) is None:
        return False
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


def validate(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="YAML file with one TrainingJob, or with queues, topologies and fault policies; - reads "
            "standard input."
        ),
    ],
    for_cluster: Annotated[
        bool,
        typer.Option(
            "--for-cluster",
            help="The job is for a cluster: do not look for its data, folders and weights on this machine.",
        ),
    ] = False,
    output: OutputOption = Format.TABLE,
) -> int:
    """Check a job and show its plan, or check queues, topologies and fault policies; start nothing.

    The datasets (where this machine has any), folders and weights that the job names are looked up on this machine.

    Examples:

      polyreme validate manifests/samples/quickstart.yaml

      polyreme validate job.yaml --for-cluster

      polyreme validate manifests/samples/queues.yaml
    """
    from polyreme.job_files import load_cluster_objects, read_documents, the_document
    from polyreme_api.pod_template import unknown_fields
    from polyreme_planner.loading import load_job

    documents = read_documents(file)
    objects = load_cluster_objects(documents)
    if objects is not None:
        rows = [{"kind": checked.kind, "name": checked.metadata.name} for checked in objects]
        emit("Objects", rows, output=output, columns=[("kind", "kind"), ("name", "name")])
        return ExitCode.OK
    checked = load_job(the_document(documents, file))
    if unknown := unknown_fields(checked.spec.workers.template):
        note(unknown)
    if checked.spec.workers.runtime.mode == "Environment":
        return _show_gang(checked, output)
    if not for_cluster:
        _check_here(context.obj, checked)
    return _show_plan(checked, output, visits="" if for_cluster else _visits(context.obj, checked))


def _visits(home: Home, checked: TrainingJob) -> str:
    """Say how often a run of this job visits the samples of its sources; empty before its data are processed."""
    from polyreme.run_files.data import visits_of

    run, steps = home.run(checked.metadata.namespace, checked.metadata.name), checked.spec.training.steps
    return "; ".join(
        f"{of.name} {of.visits.least:,} to {of.visits.most:,} times, {of.visits.unseen:,} samples never"
        for row in visits_of(home, run, checked.spec, None, steps=steps)[-1:]
        for of in row.sources
        if of.visits is not None
    )


def _show_gang(checked: TrainingJob, output: Format) -> int:
    """Show what is known of a job that brings its own training."""
    from polyreme_planner.plan import plan_for

    plan = plan_for(checked.spec)
    value = {
        "name": checked.metadata.name,
        "workers": plan.replicas,
        "ranks": plan.layout.world,
        "layout": str(plan.layout),
        "planHash": plan.hash,
    }
    columns = [("job", "name"), ("workers", "workers"), ("ranks", "ranks"), ("layout", "layout"), ("plan", "planHash")]
    emit("Plan", value, output=output, columns=columns)
    return ExitCode.OK


def _check_here(home: Home, checked: TrainingJob) -> None:
    """Look up what the job names on this machine.

    Raises:
        PolyremeError: As ``polyreme run`` would end, but for what lies in a bucket: that is not read.
    """
    from polyreme.local_run import preflight

    preflight.check_rates(checked)
    preflight.check_folders(home.run(checked.metadata.namespace, checked.metadata.name), checked)
    weights = checked.spec.model.weights
    readable = weights is not None and not _in_bucket(weights.location)
    if readable:
        preflight.check_weights(checked)
    if not _in_bucket(checked.spec.data.tokenizer.location or ""):
        preflight.check_tokenizer(checked, with_weights=readable)
    if home.has_data:
        preflight.check_data(home, checked)
    elif unknown := preflight.unknown_here(checked):
        note(
            f"datasets are not looked up: {', '.join(unknown)}; {home.path} has none yet, and a run needs "
            "them: polyreme data register NAME SOURCE"
        )
    for words in preflight.warnings(checked):
        note(words)


def _in_bucket(location: str) -> bool:
    return urlsplit(location).scheme == "s3"


def _show_plan(checked: TrainingJob, output: Format, *, visits: str) -> int:
    """Show the plan that a job would get."""
    from polyreme_planner.curriculum import curriculum_stages, kinds_of_packs, packs_of_stages
    from polyreme_planner.model_parts import parameter_count
    from polyreme_planner.plan import plan_for
    from polyreme_planner.plan_inputs import setting_of
    from polyreme_planner.precision import precision_of
    from polyreme_planner.refusals import memory_of_cut

    spec = checked.spec
    plan = plan_for(spec)
    memory = memory_of_cut(
        setting_of(spec, plan.shape),
        plan.layout,
        plan.cut,
        packs_per_step=kinds_of_packs(spec)[0].per_step,
        recompute=plan.recompute_of(spec),
    )
    state_bytes = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    value = {
        "name": checked.metadata.name,
        "model": plan.shape.name,
        "parameters": parameter_count(plan.shape),
        "ranks": plan.layout.world,
        "hardware": plan.hardware,
        "precision": precision_of(spec.training, plan.hardware) + (" (TF32)" if spec.training.tf32 else ""),
        "layout": str(plan.layout),
        "cut": str(plan.cut),
        "recompute": plan.recompute_label or "None",
        "planHash": plan.hash,
        "packsPerRank": plan.packs_per_rank,
        "stages": "; ".join(
            _stage_words(*both) for both in zip(curriculum_stages(spec), packs_of_stages(spec), strict=True)
        ),
        "visits": visits or None,
        "stateBytesPerRank": state_bytes,
        "memoryBytesPerRank": memory.total_bytes,
        "traffic": "; ".join(
            f"{group.axis} {size(group.bytes_per_rank)} per step in {group.messages:,} messages"
            for group in plan.volumes
        ),
    }
    words = {
        "parameters": f"{value['parameters']:,}",
        "stateBytesPerRank": size(state_bytes),
        "memoryBytesPerRank": f"{size(memory.total_bytes)}: {memory.largest()}",
    }
    emit(
        "Plan",
        value if output is Format.JSON else value | words,
        output=output,
        columns=[
            ("job", "name"),
            ("model", "model"),
            ("parameters", "parameters"),
            ("ranks", "ranks"),
            ("hardware", "hardware"),
            ("precision", "precision"),
            ("layout", "layout"),
            ("cut", "cut"),
            ("recompute", "recompute"),
            ("plan", "planHash"),
            ("packs per rank", "packsPerRank"),
            ("training", "stages"),
            *([("visits", "visits")] if visits else ()),
            ("state per rank", "stateBytesPerRank"),
            ("memory per rank", "memoryBytesPerRank"),
            ("traffic per rank", "traffic"),
        ],
    )
    return ExitCode.OK


def _stage_words(stage: CurriculumStage, packs: Packs) -> str:
    alone = f" of {' and '.join(stage.learns_alone)}" if stage.learns_alone else ""
    theta = "" if stage.rope_theta is None else f", theta {stage.rope_theta:g}"
    words = f"{stage.steps:,} steps{alone}, {packs.per_step:,} x {packs.tokens:,} tokens{theta}"
    return f"{stage.name} {words}".strip()
