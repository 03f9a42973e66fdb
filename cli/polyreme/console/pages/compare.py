"""Compare: fields of the spec that differ, figures, curves over steps, tokens or time, and parallel axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.curves import COLOURS, curves_chart, parallel_chart
from polyreme.console.live import opened
from polyreme.console.route import Route
from polyreme.console.run_source import RunCurves, RunName, RunQuery, RunSource
from polyreme.report.comparison import differing
from polyreme.report.svg import safe
from polyreme.views.formatting import NOTHING, duration, share
from polyreme_api.errors import PolyremeError

PATH = "/compare"
RUNS_MAX = 100
COLUMNS_MAX = 8
"""Runs that are columns of the table; more are its rows."""
MEASURES = ("loss", "held-out loss", "learning rate", "gradient norm")
AXES = ("step", "tokens", "hours")
OFFERED = 50
FIGURES = (
    ("step", "step"),
    ("loss", "loss"),
    ("best loss", "bestLoss"),
    ("held out", "heldoutLoss"),
    ("best held out", "bestHeldoutLoss"),
    ("held-out correct", "heldoutExactMatchRatio"),
    ("goodput", "goodputRatio"),
    ("tokens a second", "tokensPerSecond"),
    ("wall time", "wallSeconds"),
    ("attempts", "attempts"),
)


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show a comparison."""
    names = list(dict.fromkeys(request.query.getall("run", [])))
    measure, axis = request.query.get("measure", ""), request.query.get("over", "")
    measure, axis = measure if measure in MEASURES else MEASURES[0], axis if axis in AXES else AXES[0]
    source = console.source(request)
    body = await opened(lambda: _body(source, names, measure, axis))
    return console.page("Compare", f"<h1>Compare</h1>{body}", current=PATH)


ROUTES = (Route(method="GET", path=PATH, handle=show, title="Compare", place=2),)


async def _body(source: RunSource, names: Sequence[str], measure: str, axis: str) -> str:
    runs, notices = await _read(source, names)
    if len(runs) < 2:
        return notices + await _choice(source, names)
    differences = differing([each.compared for each in runs])
    links = {"run": list(names)}
    measures = [
        (markup.query(PATH, {**links, "measure": each, "over": axis}), each, each == measure) for each in MEASURES
    ]
    axes = [(markup.query(PATH, {**links, "measure": measure, "over": each}), each, each == axis) for each in AXES]
    typed = source.compare_command([each.run for each in runs])
    command = f"<p class='soft'>In a terminal: <code>{safe(typed)}</code></p>" if typed else ""
    curves = {each.run: each.curve for each in runs}
    result, title = _result(runs)
    parallel = parallel_chart(runs, list(differences), result=result, title=title)
    return (
        f"{notices}{command}"
        f"{markup.tabs(measures, label='measure')}{markup.tabs(axes, label='over')}"
        f'<div class="card">{curves_chart(curves, measure=measure, axis=axis)}{_key(runs)}</div>'
        f"<h2>What differs</h2>{_differences(runs, differences)}<h2>Figures</h2>{_figures(runs)}"
        + (f'<h2>Fields and {title}</h2><div class="card">{parallel}</div>' if parallel else "")
    )


def _result(runs: Sequence[RunCurves]) -> tuple[str, str]:
    """Return the figure by which runs are compared, and its title: a loss that only some have compares nothing."""
    if all(each.compared.figures.get("bestHeldoutLoss") is not None for each in runs):
        return "bestHeldoutLoss", "best held-out loss"
    return "bestLoss", "best training loss"


async def _read(source: RunSource, names: Sequence[str]) -> tuple[list[RunCurves], str]:
    runs, notices = [], ""
    for name in names[:RUNS_MAX]:
        try:
            runs.append(await source.compared(RunName.read(name)))
            if runs[-1].said:
                notices += markup.notice(f"run {name[:100]!r} has no curves here: {runs[-1].said}")
        except (PolyremeError, OSError) as error:
            notices += markup.notice(f"run {name[:100]!r} is left out: {str(error)[:300]}", "bad")
    if len(names) > RUNS_MAX:
        notices += markup.notice(f"{len(names)} runs are chosen, the first {RUNS_MAX} are shown", "bad")
    return runs, notices


async def _choice(source: RunSource, names: Sequence[str]) -> str:
    """Offer the newest runs to choose from."""
    found = await source.find(RunQuery(count=OFFERED))
    boxes = "".join(
        f'<p><label class="check"><input type="checkbox" name="run" value="{safe(row.namespace)}/{safe(row.name)}"'
        f"{' checked' if f'{row.namespace}/{row.name}' in names else ''}> "
        f"{safe(str(row.run))}</label> "
        f"{markup.badge(row.state)}</p>"
        for row in found.rows
    )
    if not boxes:
        return '<div class="card empty"><p>There is no run yet.</p></div>'
    return (
        f'<p>Choose two runs or more.</p><form method="get" action="{PATH}"><div class="card">{boxes}</div>'
        '<div class="bar"><button class="main">Compare</button></div></form>'
    )


def _key(runs: Sequence[RunCurves]) -> str:
    entries = "".join(
        f'<li><i class="line c{at % COLOURS}"></i>{safe(str(each.run))}</li>' for at, each in enumerate(runs[:24])
    )
    return f'<ul class="key">{entries}</ul>'


def _differences(runs: Sequence[RunCurves], differences: dict[str, list[Any]]) -> str:
    if not differences:
        return "<p>The specs are alike.</p>"
    rows = {field.removeprefix("spec."): [_text(value) for value in values] for field, values in differences.items()}
    return _table(runs, rows, said="fields that differ")


def _figures(runs: Sequence[RunCurves]) -> str:
    rows = {}
    for heading, key in FIGURES:
        values = [_figure(key, each.compared.figures.get(key)) for each in runs]
        if set(values) != {NOTHING}:
            rows[heading] = values
    return _table(runs, rows, said="figures")


def _table(runs: Sequence[RunCurves], rows: dict[str, list[str]], *, said: str) -> str:
    """Write a table whose columns are the runs, or whose rows are where there are many."""
    links = [markup.link(markup.run_path(each.run.namespace, each.run.name), str(each.run)) for each in runs]
    names = [f'<i class="c{at % COLOURS}"></i>{link}' for at, link in enumerate(links)]
    if len(runs) <= COLUMNS_MAX:
        top = "".join(f'<th scope="col">{name}</th>' for name in names)
        body = "".join(
            f'<tr><th scope="row">{safe(field)}</th>{"".join(f"<td>{safe(value)}</td>" for value in values)}</tr>'
            for field, values in rows.items()
        )
    else:
        top = "".join(f'<th scope="col" title="{safe(field)}">{safe(field.rpartition(".")[2])}</th>' for field in rows)
        body = "".join(
            f'<tr><th scope="row">{name}</th>{"".join(f"<td>{safe(values[at])}</td>" for values in rows.values())}</tr>'
            for at, name in enumerate(names)
        )
    return (
        f'<div class="card table" tabindex="0" role="region" aria-label="{said}"><table class="compare">'
        f"<thead><tr><td></td>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _text(value: Any) -> str:
    return NOTHING if value is None else str(value)[:200]


def _figure(key: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if key in {"goodputRatio", "heldoutExactMatchRatio"}:
        return share(value)
    if key == "wallSeconds":
        return duration(value)
    if key == "tokensPerSecond":
        return f"{value:,.0f}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
