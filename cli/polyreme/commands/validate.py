"""``polyreme validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from polyreme.commands.job_arguments import SetOption
from polyreme.job_files import load_cluster_objects, read_documents, the_document
from polyreme.job_overrides import combined
from polyreme.local_run import preflight
from polyreme.run_files.data import steps_of, steps_words, visits_of
from polyreme.run_files.paths import Home
from polyreme.views.formatting import size
from polyreme.views.output import Format, ManifestFormat, emit, note, print_manifests
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJob
from polyreme_api.pod_template import unknown_fields
from polyreme_planner.curriculum import CurriculumStage, Packs, curriculum_stages, packs_of_stages
from polyreme_planner.loading import load_job
from polyreme_planner.model_parts import parameter_count
from polyreme_planner.plan import memory_of_plan, plan_for, step_of_plan
from polyreme_planner.precision import precision_of


def validate(
    context: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="YAML file with one TrainingJob, or with queues, topologies and fault policies; - reads "
            "standard input. Of several files with a job, each is merged over the one before.",
            metavar="FILE",
        ),
    ],
    settings: SetOption = None,
    for_cluster: Annotated[
        bool,
        typer.Option(
            "--for-cluster",
            help="The job is for a cluster: do not look for its data, folders and weights on this machine.",
        ),
    ] = False,
    output: Annotated[
        ManifestFormat,
        typer.Option("-o", "--output", help="Output format; yaml: the manifest, merged and with --set."),
    ] = ManifestFormat.TABLE,
) -> int:
    """Check a job and show its plan, or check queues, topologies and fault policies; start nothing.

    The datasets (where this machine has any), folders and weights that the job names are looked up on this machine.

    Examples:

      polyreme validate manifests/samples/quickstart.yaml

      polyreme validate job.yaml --for-cluster

      polyreme validate base.yaml mine.yaml --set training.steps=200 -o yaml

      polyreme validate manifests/samples/queues.yaml
    """
    documents = [read_documents(path) for path in files]
    objects = load_cluster_objects(documents[0]) if len(files) == 1 and not settings else None
    if objects is not None:
        if output is ManifestFormat.YAML:
            print_manifests(documents[0])
            return ExitCode.OK
        rows = [{"kind": checked.kind, "name": checked.metadata.name} for checked in objects]
        emit("Objects", rows, output=Format(output), columns=[("kind", "kind"), ("name", "name")])
        return ExitCode.OK
    manifests = [the_document(*both) for both in zip(documents, files, strict=True)]
    manifest = combined(manifests, files, settings or ())
    checked = load_job(manifest)
    if unknown := unknown_fields(checked.spec.workers.template):
        note(unknown)
    brings_training = checked.spec.workers.runtime.mode == "Environment"
    if not for_cluster and not brings_training:
        _check_here(context.obj, checked)
    if output is ManifestFormat.YAML:
        print_manifests([manifest])
        return ExitCode.OK
    if brings_training:
        return _show_gang(checked, Format(output))
    run = context.obj.run(checked.metadata.namespace, checked.metadata.name)
    return _show_plan(
        checked,
        Format(output),
        run_words=steps_words(run, checked.spec),
        visits="" if for_cluster else _visits(context.obj, checked),
    )


def _visits(home: Home, checked: TrainingJob) -> str:
    """Say how often a run of this job visits the samples of its sources; empty before its data are processed."""
    run = home.run(checked.metadata.namespace, checked.metadata.name)
    steps = steps_of(run, checked.spec)
    return "; ".join(
        f"{of.name} {of.visits.least:,} to {of.visits.most:,} times, {of.visits.unseen:,} samples never"
        for row in visits_of(home, run, checked.spec, None, steps=steps)[-1:]
        for of in row.sources
        if of.visits is not None
    )


def _show_gang(checked: TrainingJob, output: Format) -> int:
    """Show what is known of a job that brings its own training."""
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
    preflight.check_rates(checked)
    preflight.check_folders(home.run(checked.metadata.namespace, checked.metadata.name), checked)
    weights = checked.spec.model.weights
    readable = weights is not None and not _in_bucket(weights.location)
    if readable:
        preflight.check_weights(checked)
    if not _in_bucket(checked.spec.data.tokenizer.location or ""):
        preflight.check_tokenizer(checked, with_weights=readable)
    if checked.spec.start_from is not None and not _in_bucket(checked.spec.start_from.checkpoint):
        preflight.check_start(checked)
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


def _show_plan(checked: TrainingJob, output: Format, *, run_words: str, visits: str) -> int:
    """Show the plan that a job would get."""
    spec = checked.spec
    plan = plan_for(spec)
    memory = memory_of_plan(spec, plan)
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
        "stepSeconds": round(step_of_plan(spec, plan), 6),
        "stages": "; ".join(
            _stage_words(*both, run_words=run_words)
            for both in zip(curriculum_stages(spec), packs_of_stages(spec), strict=True)
        ),
        "visits": visits or None,
        "stateBytesPerRank": state_bytes,
        "startBytesPerRank": memory.start_bytes,
        "memoryBytesPerRank": memory.total_bytes,
        "traffic": "; ".join(
            f"{group.axis} {size(group.bytes_per_rank)} per step in {group.messages:,} messages"
            for group in plan.volumes
        ),
    }
    words = {
        "parameters": f"{value['parameters']:,}",
        "stepSeconds": f"{value['stepSeconds']:.3g} s, estimated",
        "stateBytesPerRank": size(state_bytes),
        "startBytesPerRank": size(memory.start_bytes),
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
            ("step", "stepSeconds"),
            ("training", "stages"),
            *([("visits", "visits")] if visits else ()),
            ("state per rank", "stateBytesPerRank"),
            ("at the start", "startBytesPerRank"),
            ("memory per rank", "memoryBytesPerRank"),
            ("traffic per rank", "traffic"),
        ],
    )
    return ExitCode.OK


def _stage_words(stage: CurriculumStage, packs: Packs, *, run_words: str) -> str:
    alone = f" of {' and '.join(stage.learns_alone)}" if stage.learns_alone else ""
    theta = "" if stage.rope_theta is None else f", theta {stage.rope_theta:g}"
    steps = f"{stage.steps:,} steps" if stage.name else run_words
    words = f"{steps}{alone}, {packs.per_step:,} x {packs.tokens:,} tokens{theta}"
    return f"{stage.name} {words}".strip()
