"""``polyreme checkpoint``: what a run saved, and a model made of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from polyreme.busy import busy
from polyreme.commands.runs import find
from polyreme.files import read_json
from polyreme.home import Home
from polyreme.output import Format, emit, nearest, note
from polyreme.records import checkpoint_root, read_records
from polyreme_api.errors import NotFoundError, RefusedError

app = typer.Typer(help="Checkpoints of the runs on this machine.", no_args_is_help=True)

OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Form of the data on standard output.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the run, or NAMESPACE/NAME.")]


@app.command()
def ls(context: typer.Context, name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """List a run's checkpoints: committed or torn, on the committed history or not.

    Example: polyreme checkpoint ls quickstart
    """
    from polyreme.documents import read_job

    run = find(context.obj, name)
    records = read_records(checkpoint_root(run, read_job(run.job_file)))
    rows = [
        {
            "name": entry.name,
            "attempt": entry.reference.attempt,
            "step": entry.reference.step,
            "committed": entry.committed,
            "history": entry.history,
            "bytes": entry.size_bytes,
        }
        for entry in records.checkpoints
    ]
    emit(
        "CheckpointList",
        rows,
        output=output,
        columns=[
            ("NAME", "name"),
            ("ATTEMPT", "attempt"),
            ("STEP", "step"),
            ("COMMITTED", "committed"),
            ("HISTORY", "history"),
            ("BYTES", "bytes"),
        ],
    )


@app.command()
def export(
    context: typer.Context,
    name: NameArgument,
    to: Annotated[Path, typer.Option("--to", help="Folder to write.")],
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write a checkpoint's model under Hugging Face's names: sharded safetensors and config.json.

    Examples:

      polyreme checkpoint export quickstart --to ./model

      polyreme checkpoint export quickstart --to ./model --checkpoint a000001-s00000050
    """
    from polyreme.documents import read_job
    from polyreme_api.plan.plan import plan_for
    from polyreme_datahub.hub import open_source
    from polyreme_datahub.loader.open import open_tokenizer, sleep_really
    from polyreme_trainer.parallel.world import RankSettings
    from polyreme_trainer.train.offline import export_checkpoint
    from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings

    home: Home = context.obj
    run = find(home, name)
    job = read_job(run.job_file)
    root = checkpoint_root(run, job)
    chosen = _chosen(root, name, checkpoint)
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise RefusedError(f"no empty folder: {to}; the export replaces nothing that it did not write", field="--to")
    plan = plan_for(job.spec)
    uid = str((read_json(run.data_report) or {}).get("job", ""))
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=plan.layout,
        shape=plan.shape,
        steps=job.spec.training.steps,
        checkpoint=CheckpointSettings(root=root, resume_from=chosen),
    )
    note(f"exporting {chosen} of {name}")
    with busy(f"exporting {chosen}"):
        tokens = open_source(home.objects_url, job.spec, job=uid, wait_s=0.0).token_ids
        tokenizer = open_tokenizer(home.objects_url, job.spec, job=uid, wait_s=0.0, sleep=sleep_really)
        told = dataclasses.replace(settings, tokenizer=tokenizer)
        step = export_checkpoint(told, tokens=tokens, directory=to.absolute())
    emit(
        "Export",
        {"checkpoint": chosen, "step": step, "folder": str(to.absolute())},
        output=output,
        columns=[("checkpoint", "checkpoint"), ("step", "step"), ("folder", "folder")],
    )


def _chosen(root: Path, name: str, wanted: str | None) -> str:
    """Return the wanted checkpoint, or the newest of the committed history.

    Raises:
        NotFoundError: If there is none, naming those nearest.
    """
    entries = read_records(root).checkpoints
    usable = {entry.name: entry.reference.step for entry in entries if entry.committed}
    if wanted is not None:
        if wanted not in usable:
            raise NotFoundError(
                f"no committed checkpoint {wanted!r} of run {name!r}: {nearest(wanted, usable)}", field="--checkpoint"
            )
        return wanted
    history = [entry.name for entry in entries if entry.history]
    if not history:
        raise NotFoundError(f"run {name!r} has no committed checkpoint under {root}", field="NAME")
    return max(history, key=lambda entry: usable[entry])
