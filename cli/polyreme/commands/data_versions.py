"""``polyreme data``: versions of a dataset: tags, differences, subsets, splits, lineage, statistics."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyreme.commands.data_values import data_home, plain
from polyreme.views.output import Format, OutputOption, columns_of, emit, emit_tables, lines
from polyreme_api.errors import InvalidConfigError
from polyreme_datahub import lifecycle

SHARE_MAX = 1e6

NameArgument = Annotated[str, typer.Argument(help="NAME, NAME@VERSION or NAME@TAG.")]


def tag(
    context: typer.Context,
    name: NameArgument,
    label: Annotated[str | None, typer.Argument(help="The tag; without one, tags are listed.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag; its version stays.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Point a tag at a version, list the tags of a dataset, or remove one. Jobs may name NAME@TAG.

    Examples:

      polyreme data tag receipts@2 golden

      polyreme data tag receipts golden --remove
    """
    url = data_home(context).registry_url
    dataset = name.partition("@")[0]
    if label is not None and remove:
        row = {"tag": f"{dataset}@{label}", "removed": lifecycle.untag(url, dataset, label)}
        emit("RemovedTag", row, output=output, columns=lines("tag", "removed"))
        return
    if label is not None:
        lifecycle.tag(url, name, label)
    rows = [
        {"tag": f"{dataset}@{one}", "version": f"{dataset}@{number}"}
        for one, number in lifecycle.list_tags(url, dataset).items()
    ]
    emit("TagList", rows, output=output, columns=columns_of("tag", "version"))


def diff(
    context: typer.Context,
    before: NameArgument,
    after: NameArgument,
    output: OutputOption = Format.TABLE,
) -> None:
    """Compare two versions by the ids of their samples and the content of their records.

    Example: polyreme data diff receipts@1 receipts@2
    """
    found = plain(lifecycle.diff(data_home(context).registry_url, before, after))
    emit("DatasetDiff", found, output=output, columns=lines("added", "removed", "changed", "same"))
    if output is Format.TABLE:
        shown = [(kind, [{"sample": one} for one in found[f"first{kind.title()}"]]) for kind in ("added", "removed")]
        shown.append(("changed", [{"sample": one} for one in found["firstChanged"]]))
        emit_tables([(f"first {kind}", rows, [("SAMPLE", "sample")]) for kind, rows in shown])


def subset(
    context: typer.Context,
    name: NameArgument,
    to: Annotated[str, typer.Option("--name", help="Dataset that gets the subset.")],
    where: Annotated[str, typer.Option(help="Expression over the columns of the version.")],
    output: OutputOption = Format.TABLE,
) -> None:
    """Make a version of the samples that an expression chooses; no image is copied.

    Columns are ordinal and sample_id, and for a version that a recipe made those of its manifest: width, height,
    images, text_length, and <step>_<field> of each operation.

    Example: polyreme data subset receipts --name receipts/wide --where "width >= 2 * height and text_length < 500"
    """
    home = data_home(context)
    _versions([lifecycle.subset(home.registry_url, home.objects_url, name, to, where)], output)


def split(
    context: typer.Context,
    name: NameArgument,
    parts: Annotated[list[str], typer.Argument(help="PART=SHARE, two or more.")],
    group: Annotated[str, typer.Option(help="Column whose equal values stay together.")] = "sample_id",
    salt: Annotated[str, typer.Option(help="Another salt gives other splits.")] = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Split a version into datasets NAME/PART; samples of one group are never in two of them.

    Example: polyreme data split receipts train=9 heldout=1
    """
    home = data_home(context)
    shares = dict(map(_share, parts))
    _versions(lifecycle.split(home.registry_url, home.objects_url, name, shares, group, salt=salt), output)


def lineage(
    context: typer.Context,
    name: NameArgument,
    sample: Annotated[str, typer.Argument(help="Id of the sample.")],
    output: OutputOption = Format.TABLE,
) -> None:
    """Show how a recipe made a sample of a version: its record, and the output of each operation.

    Example: polyreme data lineage receipts receipt-17
    """
    home = data_home(context)
    found = plain(lifecycle.sample_lineage(home.registry_url, home.objects_url, name, sample))
    emit("SampleLineage", found, output=output, columns=lines("reference", "sampleId", "source", "ordinal", "record"))
    if output is Format.TABLE:
        rows = [{**step, "inputs": " ".join(one[:12] for one in step["inputs"])} for step in found["steps"]]
        emit_tables([("steps", rows, columns_of("step", "operation", "inputs", "output"))])


def stats(context: typer.Context, name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Show counts of a version's samples, and quantiles of the image sizes, shapes and text lengths of its records.

    Of preferences also the lengths of both answers, and the share of words with which both begin.

    Example: polyreme data stats receipts -o json
    """
    home = data_home(context)
    found = lifecycle.statistics(home.registry_url, home.objects_url, name)
    counts = [name for name in ("samples", "images", "turns", "pairs") if name in found]
    emit("DatasetStatistics", found, output=output, columns=lines(*counts))
    if output is Format.TABLE:
        rows = [{"of": key, **value} for key, value in found.items() if isinstance(value, dict)]
        emit_tables([("quantiles", rows, columns_of(*rows[0]))])


def _share(text: str) -> tuple[str, float]:
    part, _, share = text.partition("=")
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if not part or not 0 < value <= SHARE_MAX:
        raise InvalidConfigError(f"split is {text!r}, expected PART=SHARE with a positive share", field="PARTS")
    return part, value


def _versions(versions: Any, output: Format) -> None:
    rows = [{**plain(version), "dataset": version.reference} for version in versions]
    emit("DatasetVersionList", rows, output=output, columns=columns_of("dataset", "records"))
