"""Run: its report as it is now, the commands that act on it, its job."""

from __future__ import annotations

import dataclasses

from aiohttp import web

from polyreme.console import markup
from polyreme.console.actions import ACTIONS, Action, full_name
from polyreme.console.commands import Started, as_typed
from polyreme.console.context import Console
from polyreme.console.live import live_part, shown, stream
from polyreme.console.route import Route
from polyreme.console.run_paths import run_of, run_tabs
from polyreme.report import page as report_page
from polyreme.report.run_summary import STOPPED, describe
from polyreme.report.svg import safe
from polyreme.report.write import REPORT_NAME
from polyreme.run_files.logs import is_served
from polyreme.run_files.paths import RunDirectory
from polyreme.views.formatting import moment
from polyreme.views.output import nearest
from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_api.exit_codes import ExitCode

PATH = "/runs/{namespace}/{name}"
_REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show a run."""
    run = run_of(console, request)
    part = await console.read(lambda: _part(console, run))
    live = live_part(f"/live{markup.run_path(run.namespace, run.name)}", part)
    body = run_tabs(run, "Overview") + live
    return console.page(full_name(run), body, current="/")


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the page's content as it changes."""
    run = run_of(console, request)
    return await stream(console, request, lambda: _part(console, run))


async def report(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the report as it was written, under its own policy: it holds styles, and needs nothing else."""
    path = run_of(console, request).report / REPORT_NAME
    if not await console.read(path.is_file):
        raise NotFoundError("this run has no report yet; it is written at its end")
    response = web.FileResponse(path)
    response.headers["Content-Security-Policy"] = _REPORT_POLICY
    return response


async def act(console: Console, request: web.Request) -> web.StreamResponse:
    """Start the command of an action."""
    run = run_of(console, request)
    action = next((each for each in ACTIONS if each.name == request.match_info["action"]), None)
    if action is None:
        raise NotFoundError(f"no action {request.match_info['action'][:64]!r}")
    if not run.exists:
        raise NotFoundError(f"no run {full_name(run)!r}: it was deleted, or has not begun")
    if is_served(run) is not action.while_served:
        words = "is not being served" if action.while_served else "is being served: suspend it first"
        raise RefusedError(f"run {full_name(run)!r} {words}")
    console.commands.start(action.arguments(run), subject=_subject(run), log=action.log(run))
    raise web.HTTPSeeOther("/" if action.name == "delete" else markup.run_path(run.namespace, run.name))


ROUTES = (
    Route(method="GET", path=PATH, handle=show),
    Route(method="GET", path=f"{PATH}/report", handle=report),
    Route(method="GET", path=f"/live{PATH}", handle=follow),
    Route(method="POST", path=f"{PATH}/actions/{{action}}", handle=act),
)


def _subject(run: RunDirectory) -> str:
    return f"{run.namespace}/{run.name}"


def _part(console: Console, run: RunDirectory) -> str:
    started = "".join(_started(each) for each in console.commands.of(_subject(run))[:3])
    if not run.exists:
        if not started:
            known = [full_name(other) for other in console.home.runs()][:10_000]
            raise NotFoundError(f"no run {full_name(run)!r}: {nearest(full_name(run), known)}")
        return f"<h1>{safe(full_name(run))}</h1><p class='lead'>The run starts.</p>{started}"
    return started + _actions(console, run) + shown(lambda: _sections(console, run))


def _sections(console: Console, run: RunDirectory) -> str:
    """Return the report's sections; where its files can't be read, what is known without them."""
    row = describe(run)
    try:
        data = dataclasses.replace(console.reader.report(run), pages=())
        if row["state"] == STOPPED:
            # The status is what the process wrote last, and that process is gone.
            data = dataclasses.replace(data, outcome=STOPPED, reason=row["message"])
        return report_page.sections(data)
    except (ValueError, KeyError, TypeError) as error:
        return (
            f"{markup.badge(str(row['state']))}<h1>{safe(full_name(run))}</h1>"
            f"<p class='lead'>{safe(row['message'])}</p>"
            + markup.notice(f"files of this run are damaged, so this is all that is known: {str(error)[:300]}", "bad")
        )


def _actions(console: Console, run: RunDirectory) -> str:
    served = is_served(run)
    parts = [_action(console, run, each) for each in ACTIONS if each.while_served is served]
    clone = markup.query("/submit", {"from": _subject(run)})
    parts.append(markup.link(clone, "Clone with changes", classes="button"))
    compare = markup.query("/compare", {"run": [_subject(run)]})
    parts.append(markup.link(compare, "Compare", classes="button"))
    return f'<div class="actions">{"".join(parts)}</div>'


def _action(console: Console, run: RunDirectory, action: Action) -> str:
    own = markup.run_path(run.namespace, run.name, f"/actions/{action.name}")
    button = f'<button class="{"bad" if action.harmful else "main"}">{action.title}</button>'
    body = markup.form(own, button, form_token=console.guard.form_token)
    typed = markup.command(as_typed(action.arguments(run)))
    return (
        f'<details name="action"><summary>{action.title}</summary><div class="card"><p>{action.says} '
        f"This runs:</p>{typed}{body}</div></details>"
    )


def _started(started: Started) -> str:
    if started.code is None:
        head, kind = "is running", ""
    else:
        head, kind = ("is done", "good") if started.code == ExitCode.OK else (f"ended with code {started.code}", "bad")
    output = f"<pre tabindex='0'>{safe(started.output)}</pre>" if started.code else ""
    return (
        f'<div class="notice {kind}" role="status"><p><code>{safe(started.words)}</code> {head}, '
        f"started {moment(started.started_s)}</p>{output}</div>"
    )
