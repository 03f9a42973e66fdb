"""``polyreme data``: datasets of this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.home import Home
from polyreme.output import Format, emit

app = typer.Typer(help="Datasets: register, list, look.", no_args_is_help=True)

OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Form of the data on standard output.")]


@app.command()
def register(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the dataset, as jobs write it.")],
    source: Annotated[Path, typer.Argument(help="A .jsonl file, or a folder of images and conversations.")],
    output: OutputOption = Format.TABLE,
) -> None:
    """Register images and conversations as a dataset; changed content becomes a new version.

    The format is documented in docs/reference/dataset-format.md.

    Example: polyreme data register receipts ./receipts.jsonl
    """
    from polyreme_datahub.hub import register as register_dataset

    home = _home(context)
    version = register_dataset(home.registry_url, home.objects_url, name, source)
    emit("DatasetVersion", _plain(version), output=output, columns=_columns(version))


@app.command()
def ls(context: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """List the datasets, those that polyreme brings along included.

    Example: polyreme data ls -o json
    """
    from polyreme_datahub.hub import list_datasets
    from polyreme_datahub.show import DatasetSummary

    rows = [_plain(summary) for summary in list_datasets(_home(context).registry_url)]
    names = [field.name for field in dataclasses.fields(DatasetSummary)]
    emit("DatasetList", rows, output=output, columns=[(name.upper().replace("_", " "), name) for name in names])


@app.command()
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name, or NAME@VERSION.")],
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a dataset: counts, stages with what was reused, dead letters with their errors.

    Example: polyreme data show receipts
    """
    from polyreme_datahub.hub import show_dataset

    home = _home(context)
    details = show_dataset(home.registry_url, home.objects_url, name)
    emit("Dataset", _plain(details), output=output, columns=_columns(details))


def _home(context: typer.Context) -> Home:
    home: Home = context.obj
    home.prepare_data()
    return home


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value)


def _columns(value: Any) -> list[tuple[str, str]]:
    return [(field.name.replace("_", " "), field.name) for field in dataclasses.fields(value)]
