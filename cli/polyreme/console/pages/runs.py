"""Runs: a table with what differs between them, filtered and sorted by the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.guard import RefusedRequestError
from polyreme.console.live import live_part, opened, stream
from polyreme.console.route import Route
from polyreme.console.run_fields import JOB_FIELDS_MAX
from polyreme.console.run_source import ALL_NAMESPACES, RunList, RunQuery, RunRow, RunSource
from polyreme.report.svg import safe
from polyreme.views.formatting import NOTHING, moment, share
from polyreme_api.errors import PolyremeError

PATH = "/"
ROWS = 50
FIELDS_MAX = 8
"""Columns of fields that differ; the others are on the page that compares."""
_FIGURES = (
    ("state", "state"),
    ("step", "step"),
    ("loss", "loss"),
    ("held_out", "held out"),
    ("goodput", "goodput"),
    ("changed", "changed"),
)


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the table."""
    query, values, source = _query(request.query), _values(request.query), console.source(request)
    status = 200
    try:
        part = live_part(markup.query("/live/runs", values), await opened(lambda: _part(source, query, values)))
    except RefusedRequestError as error:
        if error.status != web.HTTPForbidden.status_code:
            raise
        # With the filter: another namespace may be the user's.
        part, status = markup.notice(str(error), "bad"), error.status
    filters = _filters(values, source, await _namespaces(source))
    return console.page("Runs", f"<h1>Runs</h1>{filters}{part}", current=PATH, status=status)


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the table as it changes."""
    query, values, source = _query(request.query), _values(request.query), console.source(request)
    return await stream(console, request, lambda: _part(source, query, values))


ROUTES = (
    Route(method="GET", path=PATH, handle=show, title="Runs", place=1),
    Route(method="GET", path="/live/runs", handle=follow),
)


def _values(given: Mapping[str, str]) -> dict[str, str]:
    names = ("namespace", "text", "state", "where", "sort", "order", "page")
    return {name: given[name][:200] for name in names if given.get(name)}


def _query(given: Mapping[str, str]) -> RunQuery:
    where = []
    for each in given.get("where", "").split():
        field, is_given, value = each.partition("=")
        if is_given:
            where.append((field.removeprefix("spec."), _as_stored(value)))
    page = given.get("page", "1")
    return RunQuery(
        namespace=given.get("namespace", "").strip()[:200],
        text=given.get("text", "").strip()[:200],
        state=given.get("state", ""),
        where=tuple(where[:8]),
        sort=given.get("sort", "changed")[:200],
        descending=given.get("order", "down") != "up",
        offset=(min(int(page), 100_000) - 1) * ROWS if page.isascii() and page.isdigit() and int(page) else 0,
        count=ROWS,
    )


def _as_stored(value: str) -> str:
    """Return a typed number as SQLite writes it."""
    try:
        number = float(value)
    except ValueError:
        return value
    return str(int(value)) if value.lstrip("-").isdigit() else repr(number)


async def _namespaces(source: RunSource) -> Sequence[str]:
    try:
        return await source.namespaces()
    except PolyremeError:
        return ()


def _filters(values: Mapping[str, str], source: RunSource, namespaces: Sequence[str]) -> str:
    options = "".join(
        f"<option{' selected' if values.get('state') == state else ''}>{state}</option>" for state in source.states
    )
    offered = "".join(f'<option value="{safe(each)}">' for each in (*namespaces, ALL_NAMESPACES))
    return (
        '<form class="bar" method="get" action="/" role="search">'
        f'<label>Namespace <input name="namespace" size="14" list="namespaces" autocomplete="off" '
        f'value="{safe(values.get("namespace", ""))}" placeholder="{safe(source.namespace or "all")}"></label>'
        f'<datalist id="namespaces">{offered}</datalist>'
        f'<label>Name <input type="search" name="text" value="{safe(values.get("text", ""))}"></label>'
        f'<label>State <select name="state"><option value="">any</option>{options}</select></label>'
        f'<label>Fields <input name="where" size="34" value="{safe(values.get("where", ""))}" '
        'placeholder="training.seed=1 model.preset=..."></label>'
        f'<input type="hidden" name="sort" value="{safe(values.get("sort", "changed"))}">'
        f'<input type="hidden" name="order" value="{safe(values.get("order", "down"))}">'
        "<button>Filter</button></form>"
    )


async def _part(source: RunSource, query: RunQuery, values: Mapping[str, str]) -> str:
    found = await source.find(query)
    notes = "".join(map(markup.notice, found.notes))
    if not found.rows:
        return notes + _nothing(found, source)
    fields = differing_fields([row.fields for row in found.rows])
    more = f" {len(fields) - FIELDS_MAX} more fields differ." if len(fields) > FIELDS_MAX else ""
    fields = fields[:FIELDS_MAX]
    heads = "".join(_head(key, text, values) for key, text in _FIGURES)
    heads += "".join(_head(field, _short(field, fields), values, title=field) for field in fields)
    rows = "".join(_row(row, fields) for row in found.rows)
    said = "Fields of the spec are columns where the runs on this page differ."
    if any(len(row.fields) >= JOB_FIELDS_MAX for row in found.rows):
        more += f" Of a job with more than {JOB_FIELDS_MAX:,} fields, the first {JOB_FIELDS_MAX:,} are shown and found."
    return (
        f'{notes}<form method="get" action="/compare">'
        '<div class="card table" tabindex="0" role="region" aria-label="runs">'
        f'<table class="runs"><thead><tr><td></td>{_head("name", "name", values)}{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f'<div class="bar"><button class="main">Compare the chosen runs</button>'
        f'<span class="soft">{safe(said + more)}</span></div></form>{_pager(found, query, values)}'
    )


def _nothing(found: RunList, source: RunSource) -> str:
    if found.states:
        words = f"No run of {sum(found.states.values()):,} is like that. {markup.link('/', 'Show all runs')}"
    else:
        start = markup.link("/submit", "Submit a job")
        words = f"There is no run here yet. {start}, or type <code>{safe(source.first_step)}</code>."
    return f'<div class="card empty"><p>{words}</p></div>'


def differing_fields(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields that differ between rows; those that differ most come first."""
    names = dict.fromkeys(name for row in rows for name in row)
    counted = {name: len({row.get(name) for row in rows}) for name in names}
    return sorted((name for name, count in counted.items() if count > 1), key=lambda name: -counted[name])


def _short(field: str, fields: Sequence[str]) -> str:
    last = field.rpartition(".")[2]
    return field if sum(other.rpartition(".")[2] == last for other in fields) > 1 else last


def _head(key: str, text: str, values: Mapping[str, str], *, title: str = "") -> str:
    current = values.get("sort", "changed") == key
    down = values.get("order", "down") != "up"
    to = {**values, "sort": key, "order": "up" if current and down else "down", "page": ""}
    arrow = (" \u2193" if down else " \u2191") if current else ""
    sort = f' aria-sort="{"descending" if down else "ascending"}"' if current else ""
    named = f' title="{safe(title)}"' if title else ""
    return f'<th scope="col"{sort}{named}><a href="{safe(markup.query("/", to))}">{safe(text)}{arrow}</a></th>'


def _row(row: RunRow, fields: Sequence[str]) -> str:
    name = str(row.run)
    chosen = (
        f'<input type="checkbox" name="run" value="{safe(row.namespace)}/{safe(row.name)}" aria-label="{safe(name)}">'
    )
    step = NOTHING if row.step is None else f"{row.step:,} / {row.steps or NOTHING}"
    cells = [
        chosen,
        markup.badge(row.state),
        f"{step}{markup.progress(row.step, row.steps)}",
        _number(row.loss),
        _number(row.held_out),
        share(row.goodput),
        moment(row.changed),
        *(f'<span class="differs">{safe(_written(row.fields.get(field)))}</span>' for field in fields),
    ]
    linked = markup.link(markup.run_path(row.namespace, row.name), name)
    message = f"<br><small>{safe(row.message[:120])}</small>" if row.message and row.state != "Succeeded" else ""
    rest = "".join(f"<td>{cell}</td>" for cell in cells[1:])
    return f'<tr><td>{cells[0]}</td><td class="name">{linked}{message}</td>{rest}</tr>'


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _written(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:60]


def _pager(found: RunList, query: RunQuery, values: Mapping[str, str]) -> str:
    page, last = query.offset // ROWS + 1, max(1, -(-found.total // ROWS))
    links = []
    if page > 1:
        links.append(markup.link(markup.query("/", {**values, "page": str(page - 1)}), "previous"))
    if page < last:
        links.append(markup.link(markup.query("/", {**values, "page": str(page + 1)}), "next"))
    first = query.offset + 1
    shown_words = f"{first:,} to {query.offset + len(found.rows):,} of {found.total:,} runs"
    return f'<nav class="pager" aria-label="pages of runs"><span>{shown_words}</span>{"".join(links)}</nav>'
