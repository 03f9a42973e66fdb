"""Logs: the last lines of a run's ranks, and of what else writes lines for it."""

from __future__ import annotations

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.live import live_part, opened, stream
from polyreme.console.route import Route
from polyreme.console.run_paths import run_of, run_tabs
from polyreme.console.run_source import RunName, RunSource
from polyreme.report.svg import safe

PATH = "/runs/{namespace}/{name}/logs"
TABS_MAX = 40


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the last lines of a log."""
    run, name, source = run_of(request), request.query.get("file", ""), console.source(request)
    part = await opened(lambda: _part(source, run, name))
    own = markup.run_path(run.namespace, run.name)
    head = run_tabs(source, run, "Logs") + f"<h1>{safe(str(run))}: logs</h1>"
    live = live_part(markup.query(f"/live{own}/logs", {"file": name}), part)
    return console.page(f"{run}: logs", head + live, current="/")


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the lines as they come."""
    run, name, source = run_of(request), request.query.get("file", ""), console.source(request)
    return await stream(console, request, lambda: _part(source, run, name))


ROUTES = (
    Route(method="GET", path=PATH, handle=show),
    Route(method="GET", path=f"/live{PATH}", handle=follow),
)


async def _part(source: RunSource, run: RunName, name: str) -> str:
    found = await source.logs(run, name)
    own = markup.run_path(run.namespace, run.name, "/logs")
    names = list(found.names)[:TABS_MAX]
    entries = [(markup.query(own, {"file": each}), each, each == found.chosen) for each in names]
    text = "\n".join(found.lines) or "(no line yet)"
    return (
        f"{markup.tabs(entries, label='files')}<p class='soft'>Last {len(found.lines)} lines of "
        f"<code>{safe(found.place)}</code>; in a terminal: <code>{safe(found.command)}</code></p>"
        f'<pre class="log" tabindex="0" role="log" aria-label="lines of {safe(found.chosen)}">'
        f"{markup.long_text(text)}</pre>"
    )
