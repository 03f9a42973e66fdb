"""``polyreme runs compare``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from polyreme.commands.runs import find
from polyreme.report.comparison import differing, read_run
from polyreme.report.run_summary import describe
from polyreme.run_files.paths import RunDirectory
from polyreme.views.formatting import NOTHING, duration, share
from polyreme.views.output import Format, OutputOption, emit, emit_tables, text
from polyreme_api.errors import InvalidConfigError
from polyreme_system.clock import SystemClock

RUNS_SIDE_BY_SIDE = 4
"""Up to so many runs are columns of the table; more are its rows."""


def compare(
    context: typer.Context,
    names: Annotated[
        list[str], typer.Argument(help="Names of two runs or more, each NAME or NAMESPACE/NAME.", metavar="NAME")
    ],
    output: OutputOption = Format.TABLE,
) -> None:
    """Compare runs: fields of the spec that differ, defaults included, and figures side by side.

    Losses are those of the steps that count: the last one, and the best of all. What a stage's objective measures
    beside its loss is that of the last step.

    Examples:

      polyreme runs compare quickstart slow

      polyreme runs compare quickstart slow team-a/other -o json
    """
    if len(names) < 2:
        raise InvalidConfigError(f"one run can't be compared: {names[0]!r}, expected two or more", field="NAME")
    show_comparison([find(context.obj, name) for name in names], output)


def show_comparison(runs: Sequence[RunDirectory], output: Format) -> None:
    """Print a comparison of runs that exist."""
    read = [read_run(run, SystemClock()) for run in runs]
    shown = [describe(run) for run in runs]
    differences = differing(read)
    rows = [
        {"name": row["name"], "namespace": row["namespace"], "state": row["state"], "message": row["message"]}
        | dict(each.figures)
        | {"report": row["report"]}
        for row, each in zip(shown, read, strict=True)
    ]
    if output is Format.JSON:
        fields = [{"field": field, "values": values} for field, values in differences.items()]
        emit("Comparison", {"runs": rows, "differences": fields}, output=output)
        return
    names = [row["name"] if row["namespace"] == "default" else f"{row['namespace']}/{row['name']}" for row in rows]
    specs = {field.removeprefix("spec."): [text(value) for value in each] for field, each in differences.items()}
    values = {heading: [write(row) for row in rows] for heading, write in FIGURES.items()}
    measured = dict.fromkeys(measure for row in rows for measure in row["objective"])
    values |= {measure: [text(row["objective"].get(measure)) for row in rows] for measure in measured}
    values = {heading: each for heading, each in values.items() if set(each) != {NOTHING}}
    if len(runs) <= RUNS_SIDE_BY_SIDE:
        _emit_columns("differences of the specs", names, specs)
        _emit_columns("figures", names, values)
    else:
        short = {(field if _is_ambiguous(field, specs) else _last(field)): each for field, each in specs.items()}
        _emit_rows(names, short | values)


FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "state": lambda row: row["state"],
    "attempts": lambda row: text(row["attempts"]),
    "step": lambda row: f"{row['step']}/{row['steps'] or NOTHING}",
    "loss": lambda row: text(row["loss"]),
    "best loss": lambda row: text(row["bestLoss"]),
    "held out": lambda row: text(row["heldoutLoss"]),
    "best held out": lambda row: text(row["bestHeldoutLoss"]),
    "held-out correct": lambda row: share(row["heldoutExactMatchRatio"]),
    "goodput": lambda row: share(row["goodputRatio"]),
    "tok/s": lambda row: NOTHING if row["tokensPerSecond"] is None else f"{row['tokensPerSecond']:,.0f}",
    "wall time": lambda row: duration(row["wallSeconds"]),
}
"""How the figures of a run are written, by heading; one that no run has is left out."""


def _emit_columns(title: str, names: Sequence[str], lines: dict[str, list[str]]) -> None:
    rows = [{"": what} | dict(zip(names, values, strict=True)) for what, values in lines.items()]
    emit_tables([(title, rows, [(heading, heading) for heading in ("", *names)])])


def _emit_rows(names: Sequence[str], columns: dict[str, list[str]]) -> None:
    columns = {"NAME": list(names), **columns}
    rows = [{heading: values[at] for heading, values in columns.items()} for at in range(len(names))]
    emit("Comparison", rows, output=Format.TABLE, columns=[(heading, heading) for heading in columns])


def _last(field: str) -> str:
    return field.rpartition(".")[2]


def _is_ambiguous(field: str, fields: dict[str, list[str]]) -> bool:
    return sum(_last(other) == _last(field) for other in fields) > 1
