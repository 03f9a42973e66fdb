"""Logs: the last lines of a run's ranks, of its operator and of its data pipeline."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from polyreme.console import markup
from polyreme.console.actions import full_name, run_log
from polyreme.console.context import Console
from polyreme.console.live import live_part, shown, stream
from polyreme.console.route import Route
from polyreme.console.run_paths import run_of, run_tabs
from polyreme.report.svg import safe
from polyreme.run_files import logs
from polyreme.run_files.paths import RunDirectory
from polyreme_api.errors import NotFoundError

PATH = "/runs/{namespace}/{name}/logs"
LINES = 300
CHARACTERS_MAX = 2000
"""Of a line; longer ones are cut, and say so."""
END_BYTES = 1 << 20
"""Read of a file, from its end."""


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the last lines of a file."""
    run, name = run_of(console, request), request.query.get("file", "")
    part = await console.read(lambda: shown(lambda: _part(run, name)))
    own = markup.run_path(run.namespace, run.name)
    head = run_tabs(run, "Logs") + f"<h1>{safe(full_name(run))}: logs</h1>"
    live = live_part(markup.query(f"/live{own}/logs", {"file": name}), part)
    return console.page(f"{full_name(run)}: logs", head + live, current="/")


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the lines as they come."""
    run, name = run_of(console, request), request.query.get("file", "")
    return await stream(console, request, lambda: _part(run, name))


ROUTES = (
    Route(method="GET", path=PATH, handle=show),
    Route(method="GET", path=f"/live{PATH}", handle=follow),
)


def log_files(run: RunDirectory) -> dict[str, Path]:
    """Return the files with lines of a run, by what they are called; the newest attempt first."""
    ranks = sorted(logs.rank_files(run), key=lambda found: (-found[0].attempt, found[0].rank))
    files = {f"rank {log.rank}, attempt {log.attempt}": path for log, path in ranks}
    others = {"operator": run.host_log, "data": run.data_log, "command": run_log(run)}
    return files | {name: path for name, path in others.items() if path.exists()}


def _part(run: RunDirectory, name: str) -> str:
    files = log_files(run)
    if not files:
        raise NotFoundError(f"run {full_name(run)!r} has no lines yet")
    if name and name not in files:
        raise NotFoundError(f"run {full_name(run)!r} has no lines of {name[:64]!r} any more; choose another file")
    chosen = name or next(iter(files))
    own = markup.run_path(run.namespace, run.name, "/logs")
    entries = [(markup.query(own, {"file": each}), each, each == chosen) for each in list(files)[:40]]
    lines = last_lines(files[chosen])
    text = "\n".join(lines) or "(no line yet)"
    command = f"polyreme runs logs {full_name(run)} -f"
    return (
        f"{markup.tabs(entries, label='files')}<p class='soft'>Last {len(lines)} lines of "
        f"<code>{safe(files[chosen])}</code>; in a terminal: <code>{safe(command)}</code></p>"
        f'<pre class="log" tabindex="0" role="log" aria-label="lines of {safe(chosen)}">{markup.long_text(text)}</pre>'
    )


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a file, from its last ``END_BYTES``, each cut where it is too long."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - END_BYTES))
        text = file.read().decode(errors="replace")
    lines = text.splitlines()[-LINES:]
    return [
        line if len(line) <= CHARACTERS_MAX else f"{line[:CHARACTERS_MAX]} [{len(line) - CHARACTERS_MAX:,} more]"
        for line in lines
    ]
