"""Report of a run as it was written, under its own policy: it holds styles, and needs nothing else."""

from __future__ import annotations

from aiohttp import web

from polyreme.console.context import Console
from polyreme.console.home.source import HomeSource
from polyreme.console.route import Route
from polyreme.console.run_paths import run_of
from polyreme.report.write import REPORT_NAME
from polyreme_api.errors import NotFoundError

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the file."""
    source = console.source_as(request, HomeSource)
    path = source.directory(run_of(request)).report / REPORT_NAME
    if not await source.read(path.is_file):
        raise NotFoundError("this run has no report yet; it is written at its end")
    response = web.FileResponse(path)
    response.headers["Content-Security-Policy"] = _POLICY
    return response


ROUTES = (Route(method="GET", path="/runs/{namespace}/{name}/report", handle=show),)
