"""You: as whom the API server sees the user, and the way out of the session."""

from __future__ import annotations

from aiohttp import web

from polyreme.console.context import Console
from polyreme.console.live import opened
from polyreme.console.route import Route
from polyreme.plugin.console.source import ClusterSource
from polyreme.report.svg import safe

PATH = "/you"


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the page."""
    source = console.source_as(request, ClusterSource)
    part = await opened(lambda: _part(source))
    return console.page("You", f"<h1>You</h1>{part}{console.guard.way_out(request)}", current=PATH)


ROUTES = (Route(method="GET", path=PATH, handle=show, title="You", place=9),)


async def _part(source: ClusterSource) -> str:
    return (
        f"<p>The API server knows you as <code>{safe(await source.user())}</code>. Each page is read, and each change "
        "made, with your own rights.</p><p class='soft'>In a terminal: <code>kubectl auth whoami</code>, "
        "<code>kubectl auth can-i --list</code></p>"
    )
