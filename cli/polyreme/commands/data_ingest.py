"""``polyreme data ingest``: a recipe over a source, sealed as a version of a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.commands.data_values import data_home, plain
from polyreme.views.formatting import duration, size
from polyreme.views.operation_table import OperationTable
from polyreme.views.output import Format, OutputOption, columns_of, emit, emit_tables, lines, note
from polyreme.views.spinner import busy
from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.hub import estimate_ingest
from polyreme_datahub.hub import ingest as run_recipe
from polyreme_datahub.ingest_estimate import IngestEstimate
from polyreme_datahub.recipes.files import read_shipped
from polyreme_datahub.source_ingestion import IngestReport
from polyreme_system.clock import SystemClock

WORKERS_MAX = 256
RECIPE_BYTES_MAX = 1 << 20


def ingest(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A .jsonl file or a folder, here or in s3://, or a dataset: NAME@N.")],
    recipe: Annotated[str, typer.Option(help="YAML file of the recipe, or the name of one that ships.")],
    name: Annotated[str, typer.Option(help="Dataset that gets the new version.")],
    workers: Annotated[int, typer.Option(help="Samples that are worked on at once.", min=1, max=WORKERS_MAX)] = 2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Estimate counts, bytes and time; store nothing.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Run a recipe over a source, and seal what comes through into a new version of a dataset.

    Stop it with Ctrl-C at any time: what is done stays, and the same command continues. The same source and recipe give
    the same version. Recipes that ship: captioned-pages.

    Examples:

      polyreme data ingest ./receipts.jsonl --recipe captioned-pages --name receipts

      polyreme data ingest ./receipts.jsonl --recipe captioned-pages --name receipts --dry-run

      polyreme data ingest receipts/source --recipe ./my-recipe.yaml --name receipts -o json
    """
    content = read_recipe(recipe)
    home = data_home(context)
    if dry_run:
        with busy(f"trying some records of {source}"):
            found = estimate_ingest(
                source,
                name=name,
                recipe=content,
                registry_url=home.registry_url,
                objects_url=home.objects_url,
                workers=workers,
            )
        _print_estimate(found, output)
        return
    with OperationTable(SystemClock()) as table:
        report = run_recipe(
            source,
            name=name,
            recipe=content,
            registry_url=home.registry_url,
            objects_url=home.objects_url,
            topics_url=home.topics_url,
            progress=table.show,
            workers=workers,
        )
    if output is Format.JSON:
        emit("IngestReport", plain(report), output=output)
    else:
        _print(report)
    note(summary(report))


def read_recipe(name: str) -> Any:
    """Return the content of a recipe's YAML, by path or by the name of one that ships.

    Raises:
        InvalidConfigError: If it is no YAML.
        NotFoundError: If there is no such file or name.
    """
    import yaml

    path = Path(name)
    if path.is_file():
        if path.stat().st_size > RECIPE_BYTES_MAX:
            raise InvalidConfigError(
                f"recipe file {path} has {path.stat().st_size} bytes, expected at most {RECIPE_BYTES_MAX}",
                field="--recipe",
            )
        text = path.read_text("utf-8", errors="replace")
    else:
        text = read_shipped(name)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidConfigError(f"recipe {name} is not YAML: {error}", field="--recipe") from error


def summary(report: IngestReport) -> str:
    """Say in one line what came of it, dead letters included."""
    parts = [f"{report.reference}: {report.samples:,} samples"]
    parts += [f"{report.dropped:,} dropped"] if report.dropped else []
    why = f": polyreme data show {report.reference}" if report.dead or report.dropped else ""
    parts.append(f"{report.dead:,} dead letters{why}")
    return ", ".join(parts)


def _print_estimate(found: IngestEstimate, output: Format) -> None:
    if output is Format.JSON:
        emit("IngestEstimate", plain(found), output=output)
        return
    row = {
        "records": f"{found.records:,}; {found.known:,} are known already",
        "tried": f"{found.probed}: {found.refused} would be dead letters, {found.dropped} would be dropped",
        "not tried": ", ".join(found.untried) or "nothing",
        "reads": size(found.bytes_read),
        "writes": f"{size(found.bytes_written)} of new images",
        "takes": f"{duration(found.seconds)}, {duration(found.seconds_each)} a record in one process",
    }
    emit("IngestEstimate", row, output=output, columns=lines(*row))


def _print(report: IngestReport) -> None:
    head = {
        "reference": report.reference,
        "source": f"{report.source}, {report.records:,} records",
        "samples": f"{report.samples:,} in {report.shards:,} shards, {size(report.size_bytes)}",
        "manifest": report.manifest,
        "seconds": duration(report.seconds),
    }
    shown = lines("reference:dataset", "source", "samples", "manifest", "seconds:took")
    emit("IngestReport", head, output=Format.TABLE, columns=shown)
    columns = columns_of("operation", "records", "made", "reused", "dead", "dropped")
    emit_tables([("operations", [plain(one) for one in report.operations], columns)])
