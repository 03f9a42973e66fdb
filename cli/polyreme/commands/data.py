"""``polyreme data``: datasets of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from polyreme.commands.data_values import data_home, plain
from polyreme.job_files import read_job
from polyreme.run_files.paths import Home
from polyreme.views.formatting import size
from polyreme.views.output import Format, OutputOption, columns_of, confirm, emit, emit_tables, lines, note
from polyreme.views.spinner import busy
from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_datahub.dataset_views import DatasetDetails
from polyreme_datahub.hub import list_datasets, remove_dataset, show_dataset
from polyreme_datahub.hub import register as register_dataset
from polyreme_datahub.source_ingestion import is_path
from polyreme_datahub.sources import found, look_over
from polyreme_datahub.sources.open import holds_preferences

USERS_SHOWN_MAX = 8
VERSION_LINES = lines("reference:dataset", "records", "from", "digest")


def register(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the dataset, as jobs write it.")],
    source: Annotated[
        str,
        typer.Argument(
            help="A .jsonl, .json or .csv file, or a folder of images, shards or tables; also s3://bucket/..."
        ),
    ],
    output: OutputOption = Format.TABLE,
) -> None:
    """Register images and conversations as a dataset; changed content becomes a new version.

    The format is documented in docs/reference/dataset-format.md.

    Examples:

      polyreme data register receipts ./receipts.jsonl

      polyreme data register photos s3://bucket/shards

      polyreme data register charts './charts/train-*.parquet'
    """
    if not is_path(source):
        raise NotFoundError(f"no such file or folder: {source}", field="SOURCE")
    home = data_home(context)
    with busy(f"reading {source}") as show:
        version = register_dataset(
            home.registry_url,
            home.objects_url,
            name,
            source,
            progress=lambda seen: show(f"reading {source}: {seen.files:,} files, {size(seen.bytes)}"),
        )
    if "found" in version.source:
        note(f"found {found.sentence(version.source['found'])}")
        note(look_over.sentence(version.source[look_over.FIELD]))
    row = {**plain(version), "reference": version.reference, "from": _origin(version.source)}
    emit("DatasetVersion", row, output=output, columns=VERSION_LINES)


def ls(context: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """List the datasets, including those that come with polyreme.

    Example: polyreme data ls -o json
    """
    rows = [plain(summary) for summary in list_datasets(data_home(context).registry_url)]
    emit("DatasetList", rows, output=output, columns=columns_of("name", "versions", "records", "kind"))


def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name, or NAME@VERSION.")],
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a dataset: counts, operations with what was reused, dead letters with their errors.

    Example: polyreme data show receipts
    """
    home = data_home(context)
    details = show_dataset(home.registry_url, home.objects_url, name)
    if output is Format.JSON:
        emit("Dataset", plain(details), output=output)
    else:
        _print(details)


def rm(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name, or NAME@VERSION.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Delete a dataset, or one version of it, that no run here uses. Its processed data stays in the store.

    Examples:

      polyreme data rm receipts

      polyreme data rm receipts@1 --yes
    """
    home = data_home(context)
    details = show_dataset(home.registry_url, home.objects_url, name)
    if users := _users(home, details.version.name):
        raise RefusedError(
            f"dataset {name} is used by {', '.join(users[:USERS_SHOWN_MAX])}; delete those runs first: polyreme runs rm"
        )
    confirm(f"delete dataset {name}?", yes=yes)
    removed = remove_dataset(home.registry_url, home.objects_url, name)
    emit(
        "DeletedDataset",
        {"deleted": removed} if output is Format.JSON else {"deleted": ", ".join(removed)},
        output=output,
        columns=lines("deleted"),
    )


def _users(home: Home, dataset: str) -> list[str]:
    """Name the runs of this machine whose jobs name a dataset, in any version."""
    found = []
    for run in home.runs():
        spec = read_job(run.job_file).spec
        named = [source.dataset for source in spec.data.sources]
        named += [held_out.dataset for held_out in (spec.evaluation.sets if spec.evaluation is not None else ())]
        if dataset in {reference.partition("@")[0] for reference in named}:
            found.append(run.name)
    return found


def _print(details: DatasetDetails) -> None:
    value, version = plain(details), details.version
    head = {
        **value["version"],
        "reference": version.reference,
        "from": _origin(version.source),
        "all": ", ".join(map(str, details.versions)),
        "samples": details.samples,
        "dead": details.dead,
        "holds": "preferences",
    }
    holds = ["holds"] if holds_preferences(version.source) else []
    more = lines(*holds, "samples:ingested", "dead:dead letters", "all:versions")
    emit("Dataset", head, output=Format.TABLE, columns=[*VERSION_LINES, *more])
    emit_tables(
        [
            (
                "stages, over all runs",
                value["stages"],
                columns_of("stage", "misses:made", "hits:reused", "dead", "dropped"),
            ),
            ("indexes", value["indexes"], columns_of("manifest", "samples", "tokens")),
            ("dead letters", value["deadLetters"], columns_of("sampleId:record", "stage", "rule", "error")),
            ("dropped", value["drops"], columns_of("sampleId:record", "stage", "reason")),
            ("damaged later", value["tombstones"], columns_of("sampleId:record", "error")),
        ]
    )
    if details.dead > len(details.dead_letters):
        note(f"{len(details.dead_letters)} of {details.dead} dead letters are shown")


def _origin(source: Mapping[str, Any]) -> str:
    if source["kind"] == "samples":
        return f"{source.get('from')}, by a recipe of {len(source['recipe']['operations'])} operations"
    return str(source.get("path", f"{source['kind']}, generated"))
