"""The command about device time: usage."""

from __future__ import annotations

import csv
import sys
import time
from enum import StrEnum
from typing import Annotated

import typer

from polyreme.plugin.incidents import seconds_of
from polyreme.plugin.options import AllNamespaces, Context, Kubeconfig, Namespace, target
from polyreme.plugin.printing import Output, emit_data, envelope, show
from polyreme.plugin.reading import look
from polyreme.plugin.usage import NOTHING, By, usage_rows, usage_table
from polyreme.views.output import note
from polyreme_api.labels import KIND_JOB


class Format(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def usage(
    by: Annotated[By, typer.Option("--by", help="What the sums are made by.")] = By.QUEUE,
    label: Annotated[
        str | None, typer.Option("--label", help="Key of a label of jobs to sum by, such as team.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="Days that are counted: 24h, 7d; default: all.")] = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TABLE,
    namespace: Namespace = None,
    everywhere: AllNamespaces = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Show where the device time of jobs went: productive, held, in the queue; goodput and ETTR.

    Examples:

      kubectl polyreme usage -A

      kubectl polyreme usage --by use

      kubectl polyreme usage -A --by day --since 7d -o csv
    """
    now_s = time.time()
    since_s = None if since is None else now_s - seconds_of(since)
    where = target(kubeconfig, context, namespace, everywhere=everywhere)
    sight = where.run(lambda cluster: look(cluster, {KIND_JOB: where.listed}, needed=(KIND_JOB,), now_s=now_s))
    rows = usage_rows(sight.seen, by=by, label=label or "", since_s=since_s)
    objects = [row.to_object() for row in rows]
    if output in {Format.JSON, Format.YAML}:
        emit_data(envelope("Usage", objects), Output(output.value))
    elif output is Format.CSV:
        writer = csv.DictWriter(sys.stdout, list(NOTHING.to_object()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(objects)
    elif rows:
        show(usage_table(rows, heading=label or by.value))
    else:
        note("no device time is charged yet")
