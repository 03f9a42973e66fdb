"""Machine: what trains on it, with how many workers, and what is left of processors, memory and disk."""

from __future__ import annotations

import os
import shutil

import psutil
from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.home.source import HomeSource
from polyreme.console.live import live_part, opened, stream
from polyreme.console.route import Route
from polyreme.console.run_source import RunQuery, RunRow
from polyreme.report.parts import meter, table
from polyreme.report.run_summary import describe
from polyreme.report.svg import safe
from polyreme.run_files.paths import Home
from polyreme.views.formatting import NOTHING, size
from polyreme_system.files import read_json

PATH = "/machine"
LIVE_STATES = ("Running", "Starting", "Waiting")
ROWS_MAX = 50


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the page."""
    source = console.source_as(request, HomeSource)
    part = await opened(lambda: _part(source))
    return console.page("Machine", f"<h1>This machine</h1>{live_part('/live/machine', part)}", current=PATH)


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the page as it changes."""
    source = console.source_as(request, HomeSource)
    return await stream(console, request, lambda: _part(source))


ROUTES = (
    Route(method="GET", path=PATH, handle=show, title="Machine", place=4),
    Route(method="GET", path="/live/machine", handle=follow),
)


async def _part(source: HomeSource) -> str:
    found = [await source.find(RunQuery(state=state, count=ROWS_MAX)) for state in LIVE_STATES]
    rows = [row for each in found for row in each.rows]
    return await source.read(lambda: _resources(source.home) + "<h2>Runs</h2>" + _runs(source.home, rows))


def _resources(home: Home) -> str:
    memory = psutil.virtual_memory()
    existing = next(parent for parent in (home.path, *home.path.parents) if parent.exists())
    disk = shutil.disk_usage(existing)
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    rows = [
        ("processors", f"{cores} cores", f"load {load:.0f}", meter(load / cores, "")),
        ("memory", size(memory.total), f"{size(_rounded(memory.available))} free", meter(memory.percent / 100, "")),
        ("disk", size(disk.total), f"{size(_rounded(disk.free))} free", meter(disk.used / disk.total, "")),
    ]
    words = "<p class='soft'>In a terminal: <code>polyreme doctor</code></p>"
    return words + table(("part", "#there is", "#now", ""), rows)


def _rounded(amount: int) -> int:
    """Round to 64 MiB, so that the page stays as it is while little changes."""
    return amount >> 26 << 26


def _runs(home: Home, rows: list[RunRow]) -> str:
    found = []
    for row in rows:
        run = home.run(row.namespace, row.name)
        now = describe(run)
        link = markup.link(markup.run_path(row.namespace, row.name), str(row.run))
        step = NOTHING if now["step"] is None else f"{now['step']} / {now['steps'] or NOTHING}"
        status = (read_json(run.state_file) or {}).get("status") or {}
        workers = f"{status.get('readyReplicas') or 0} of {status.get('replicas') or NOTHING}"
        state, process = markup.badge(str(now["state"])), str(now["pid"] or NOTHING)
        found.append(
            (link, state, step, safe(workers), safe(status.get("layout") or NOTHING), process, safe(now["message"]))
        )
    if not found:
        return "<p class='soft'>Nothing trains here now.</p>"
    return table(("run", "state", "#step", "#workers", "layout", "#process", "what it waits for"), found)
