"""``polyreme checkpoint``: what a run saved, and a model made of it."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyreme.commands.runs import find
from polyreme.job_files import read_job
from polyreme.local_run.preflight import check_writable
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import CheckpointEntry, checkpoint_url, read_records_at
from polyreme.views.output import Format, OutputOption, columns_of, emit, lines, nearest, note
from polyreme.views.spinner import busy
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job import TrainingJob
from polyreme_api.urls import is_bucket, is_folder
from polyreme_datahub.loader.open import open_token_ids, open_tokenizer
from polyreme_datahub.objects import open_store
from polyreme_launcher.urls import checkpoint_folder, weights_place
from polyreme_planner.adapters import adapters_of
from polyreme_planner.curriculum import curriculum_stages
from polyreme_planner.plan import plan_for
from polyreme_planner.precision import precision_of
from polyreme_system.files import read_json

if TYPE_CHECKING:
    from polyreme_trainer.export.form import WeightsForm
    from polyreme_trainer.train.settings import TrainSettings

EXPORTED = re.compile(
    r"(preprocessor_|generation_)?config\.json|model\.safetensors\.index\.json|model-\d+-of-\d+\.safetensors|tokenizer(_config)?\.json"
    r"|polyreme-template\.json|text|adapter_config\.json|adapter_model\.safetensors"
)
"""Names in the folder of an export."""


class WeightsType(enum.StrEnum):
    """Type of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT4 = "int4"


NameArgument = Annotated[str, typer.Argument(help="Name of the run, or NAMESPACE/NAME.")]
RootArgument = Annotated[
    str,
    typer.Argument(help="Name of the run, NAMESPACE/NAME, or a checkpoint root: file:///FOLDER or s3://BUCKET/PREFIX."),
]


def ls(context: typer.Context, root: RootArgument, output: OutputOption = Format.TABLE) -> None:
    """List a run's checkpoints: committed, torn or damaged, on the committed history or not.

    A bucket's server and credentials come from the environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY.

    Examples:

      polyreme checkpoint ls quickstart

      polyreme checkpoint ls s3://bucket/team/run
    """
    records = read_records_at(_url(context.obj, root))
    rows = [
        {
            "name": entry.name,
            "attempt": entry.reference.attempt,
            "step": entry.reference.step,
            "committed": entry.committed,
            "history": entry.history,
            "bytes": entry.size_bytes,
            "heldoutLoss": entry.held_out_loss,
            "why": entry.why,
        }
        for entry in records.checkpoints
    ]
    names = ("name", "attempt", "step", "committed", "history", "bytes", "heldoutLoss:held-out loss", "why")
    emit("CheckpointList", rows, output=output, columns=columns_of(*names))


def verify(
    context: typer.Context,
    root: RootArgument,
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Read every byte of a checkpoint and compare it with its checksums; exit code 4 if one differs.

    Without --checkpoint, the newest one is verified, even when it is already known to be damaged.

    Examples:

      polyreme checkpoint verify quickstart

      polyreme checkpoint verify s3://bucket/team/run --checkpoint a000001-s00000050
    """
    from polyreme_trainer.checkpoint import block_io, load

    url = _url(context.obj, root)
    chosen = chosen_checkpoint(url, root, checkpoint, damaged_too=True)
    store = open_store(url)
    marker = load.read_marker(store, chosen)
    with busy(f"reading {chosen}"):
        block_io.verify_files(store, chosen, marker)
    emit(
        "Verified",
        {
            "checkpoint": chosen,
            "files": len(marker.files),
            "bytes": sum(file.size_bytes for file in marker.files.values()),
            "verdict": "intact: every checksum matches",
        },
        output=output,
        columns=lines("checkpoint", "verdict", "files", "bytes"),
    )


def export(
    context: typer.Context,
    name: NameArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write.")],
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    dtype: Annotated[
        WeightsType, typer.Option(help="Type of the weights; routers stay float32.")
    ] = WeightsType.FLOAT32,
    group: Annotated[int, typer.Option(min=8, help="Inputs that share a scale, with --dtype int4.")] = 64,
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks of the server, with --dtype int4.")] = 1,
    adapters: Annotated[bool, typer.Option("--adapters", help="Write the adapters alone, in PEFT's form.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write a checkpoint's model under Hugging Face's names: sharded safetensors and config.json.

    The folder is created; an earlier export in it is replaced. int4 rounds the decoder's products to 4 bits by groups,
    as compressed-tensors packs them, and writes all else in bfloat16.

    Examples:

      polyreme checkpoint export quickstart --to ./model

      polyreme checkpoint export quickstart --to ./model --dtype bfloat16

      polyreme checkpoint export quickstart --to ./model --checkpoint a000001-s00000050
    """
    home: Home = context.obj
    run = find(home, name)
    chosen = chosen_checkpoint(checkpoint_url(run, read_job(run.job_file)), name, checkpoint)
    if adapters and dtype is not WeightsType.FLOAT32:
        raise InvalidConfigError(f"adapters are exported in float32, not in {dtype}", field="--dtype")
    _export(home, name, [chosen], to, output, _form(dtype, group, ranks), adapters_alone=adapters)


def average(
    context: typer.Context,
    name: NameArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write.")],
    last: Annotated[int, typer.Option("--last", min=2, help="How many checkpoints, the newest of them last.")] = 3,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write the mean of a run's last checkpoints under Hugging Face's names, as export does with one.

    The mean of what a model was over its last steps is often better than what it ended as. A run keeps as many
    checkpoints as spec.checkpoint.keep says.

    Examples:

      polyreme checkpoint average quickstart --last 3 --to ./model
    """
    home: Home = context.obj
    run = find(home, name)
    entries = read_records_at(checkpoint_url(run, read_job(run.job_file))).checkpoints
    kept = [entry.name for entry in sorted(entries, key=_age) if entry.history]
    if len(kept) < last:
        raise NotFoundError(
            f"too few checkpoints for a mean: run {name!r} has {len(kept)} on its committed history, {last} were asked "
            "for; spec.checkpoint.keep says how many a run keeps",
            field="--last",
        )
    _export(home, name, kept[-last:], to, output, _form(WeightsType.FLOAT32))


def _export(
    home: Home,
    name: str,
    chosen: Sequence[str],
    to: Path,
    output: Format,
    form: WeightsForm,
    *,
    adapters_alone: bool = False,
) -> None:
    """Write the model of a checkpoint, the mean of several, or adapters alone to a folder, and say so."""
    from polyreme_trainer.train.offline_export import export_checkpoints

    run = find(home, name)
    job = read_job(run.job_file)
    if to.exists() and not _is_replaceable(to):
        raise RefusedError(
            f"folder is not empty and not an earlier export: {to}; an export replaces only what an export wrote",
            field="--to",
        )
    check_writable(to.absolute(), field="--to")
    settings = saved_settings(run, job)
    if adapters_alone and settings.adapters is None:
        raise RefusedError(f"run {name!r} has no adapters: its job has no training.adapters", field="--adapters")
    uid = str((read_json(run.data_report) or {}).get("job", ""))
    words = chosen[0] if len(chosen) == 1 else f"the mean of {', '.join(chosen)}"
    note(f"exporting {words} of {name}")
    with busy(f"exporting {words}"):
        tokens = open_token_ids(home.objects_url, job.spec, job=uid)
        tokenizer = open_tokenizer(home.objects_url, job.spec, job=uid)
        wanted = dataclasses.replace(settings, tokenizer=tokenizer, adapters_alone=adapters_alone, export_form=form)
        step = export_checkpoints(wanted, chosen, tokens=tokens, directory=to.absolute())
    value = {"checkpoint": chosen[-1], "step": step, "folder": str(to.absolute())}
    columns = lines("checkpoint", "step", "folder")
    if len(chosen) > 1:
        value |= {"meanOf": ", ".join(chosen)}
        columns.insert(1, ("mean of", "meanOf"))
    emit("Export", value, output=output, columns=columns)


def saved_settings(run: RunDirectory, job: TrainingJob, *, as_trained: bool = False) -> TrainSettings:
    """Return the settings by which one process reads a run's checkpoints.

    Args:
        run: The run.
        job: Its job.
        as_trained: In the precision in which the run computes, as its own answers to held-out samples; else in float32.
    """
    from polyreme_trainer.parallel.world import RankSettings
    from polyreme_trainer.train.settings import CheckpointSettings, Precision, TrainSettings

    plan = plan_for(job.spec)
    precision = precision_of(job.spec.training, plan.hardware) if as_trained else Precision.FLOAT32
    adapters = adapters_of(job.spec.training, plan.shape)
    return TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=plan.layout,
        shape=plan.shape,
        precision=Precision(precision),
        steps=job.spec.training.steps or STEPS_MAX,
        curriculum=curriculum_stages(job.spec),
        seed=job.spec.training.seed,
        weights=weights_place(job.spec.model.weights.location) if adapters and job.spec.model.weights else None,
        adapters=adapters,
        checkpoint=CheckpointSettings(store=open_store(checkpoint_url(run, job))),
    )


def _form(dtype: WeightsType, group: int = 0, ranks: int = 1) -> WeightsForm:
    import torch

    from polyreme_trainer.export.form import WeightsForm

    if dtype is WeightsType.INT4:
        return WeightsForm(dtype=torch.bfloat16, int4_group=group, int4_ranks=ranks)
    return WeightsForm(dtype=getattr(torch, dtype.value))


def _is_replaceable(folder: Path) -> bool:
    """Tell whether a folder is empty, or an earlier export and nothing else."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    strange = [name for name in names if EXPORTED.fullmatch(name) is None]
    whole = ({"config.json", "model.safetensors.index.json"}, {"adapter_config.json", "adapter_model.safetensors"})
    return not strange and any(files <= names for files in whole)


def _url(home: Home, root: str) -> str:
    """Return the URL of a checkpoint root that is named by its run or by itself.

    Raises:
        InvalidConfigError: If it is a URL of another kind, or of no folder.
        NotFoundError: If there is no such run.
    """
    if "://" not in root:
        run = find(home, root)
        return checkpoint_url(run, read_job(run.job_file))
    if not (is_bucket(root) or is_folder(root)):
        rule = "file:///FOLDER or s3://BUCKET/PREFIX"
        raise InvalidConfigError(f"not a checkpoint root: {root!r}, expected {rule}", field="ROOT")
    folder = checkpoint_folder(root)
    if folder is not None and not folder.is_dir():
        raise NotFoundError(f"not a checkpoint root: {folder} is not a folder", field="ROOT")
    return root


def _age(entry: CheckpointEntry) -> tuple[int, int]:
    return entry.reference.attempt, entry.reference.step


def chosen_checkpoint(url: str, name: str, wanted: str | None, *, damaged_too: bool = False) -> str:
    """Return the wanted checkpoint, or the newest of the committed history; those that are damaged are named.

    Args:
        url: The checkpoint root.
        name: As the user named it.
        wanted: Name of a checkpoint; None for the newest.
        damaged_too: Whether a damaged one may not be passed over.

    Raises:
        NotFoundError: If there is none, naming those nearest.
        RefusedError: If the one to take is damaged.
    """
    entries = read_records_at(url).checkpoints
    newest = max((entry for entry in entries if entry.committed or entry.damaged), key=_age, default=None)
    for entry in (entry for entry in entries if entry.damaged):
        if entry.name == wanted or (wanted is None and damaged_too and entry is newest):
            raise RefusedError(f"checkpoint {entry.name} is damaged: {entry.why}", field="--checkpoint, or put it back")
        if wanted is None:
            note(f"checkpoint {entry.name} is damaged and skipped: {entry.why}")
    usable = {entry.name: entry.reference.step for entry in entries if entry.committed}
    if wanted is not None:
        if wanted not in usable:
            raise NotFoundError(
                f"no committed checkpoint {wanted!r} of run {name!r}: {nearest(wanted, usable)}", field="--checkpoint"
            )
        return wanted
    history = [entry.name for entry in entries if entry.history]
    if not history:
        raise NotFoundError(f"run {name!r} has no committed checkpoint under {url}", field="NAME")
    return max(history, key=lambda entry: usable[entry])
