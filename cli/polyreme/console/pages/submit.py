"""Submit: a form of a job that starts from an example, a run or YAML; checked by the command, then started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from polyreme.console import markup
from polyreme.console.actions import full_name, run_log, submitted_job
from polyreme.console.assets import static_text
from polyreme.console.commands import Checked
from polyreme.console.context import Console
from polyreme.console.job_form import NAME, PREFIX, as_yaml, changed, fields_html, read_base, run_command, settings_of
from polyreme.console.route import Route
from polyreme.console.run_index import RunQuery
from polyreme.console.run_paths import run_named
from polyreme.report.svg import safe
from polyreme.run_files.paths import RunDirectory
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_system.files import write_atomically

PATH = "/submit"
EXAMPLE = "example.yaml"
OFFERED = 8
"""Runs that are offered as a start."""


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the form, from an example or from a run."""
    start = request.query.get("from", "")
    base = await console.read(lambda: _base_of(console, start))
    return console.page("Submit", await console.read(lambda: _form(console, base, start)), current=PATH)


async def load(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the form from YAML."""
    base = read_base(str((await request.post()).get("yaml", "")))
    return console.page("Submit", await console.read(lambda: _form(console, base, "")), current=PATH)


async def check(console: Console, request: web.Request) -> web.StreamResponse:
    """Check the job as the form is now: its YAML, what the command says, its plan."""
    form = await request.post()
    try:
        base = read_base(str(form.get("base", "")))
        settings = settings_of(base, form)
        manifest = changed(base, settings)
        checked = await console.commands.check(["validate", "-"], as_yaml(manifest).encode())
        part = _result(checked, manifest, settings)
    except InvalidConfigError as error:
        part = markup.notice(str(error), "bad")
    if "HX-Request" in request.headers:
        return markup.html(part)
    return console.page("Submit", f"<h1>Check of a job</h1>{part}", current=PATH)


async def submit(console: Console, request: web.Request) -> web.StreamResponse:
    """Start the job as a run of its own."""
    form = await request.post()
    base = read_base(str(form.get("base", "")))
    text = as_yaml(changed(base, settings_of(base, form)))
    checked = await console.commands.check(["validate", "-"], text.encode())
    if checked.code != ExitCode.OK:
        raise InvalidConfigError(checked.errors or "the job was refused")
    run = _run_of(console, read_base(text))
    if run.exists:
        raise RefusedError(f"run {full_name(run)!r} exists: choose another metadata.name, or resume it on its page")
    file = submitted_job(run)
    await asyncio.to_thread(_write, file, text)
    console.commands.start(["run", str(file)], subject=f"{run.namespace}/{run.name}", log=run_log(run))
    raise web.HTTPSeeOther(markup.run_path(run.namespace, run.name))


ROUTES = (
    Route(method="GET", path=PATH, handle=show, title="Submit", place=3),
    Route(method="POST", path=PATH, handle=submit),
    Route(method="POST", path=f"{PATH}/check", handle=check),
    Route(method="POST", path=f"{PATH}/load", handle=load),
)


def _base_of(console: Console, start: str) -> dict[str, Any]:
    if not start:
        return read_base(static_text(EXAMPLE))
    run = run_named(console, start)
    if not run.job_file.is_file():
        raise NotFoundError(f"no run {start[:100]!r} with a job to start from")
    base = read_base(run.job_file.read_text(encoding="utf-8"))
    kept = {key: base["metadata"][key] for key in ("name", "namespace") if key in base["metadata"]}
    return {**base, "metadata": {**kept, "name": _free_name(console, run)}}


def _free_name(console: Console, run: RunDirectory) -> str:
    names = (f"{run.name[:240]}-{number}" for number in range(2, 1000))
    return next((name for name in names if not console.home.run(run.namespace, name).exists), run.name)


def _run_of(console: Console, manifest: Mapping[str, Any]) -> RunDirectory:
    metadata = manifest["metadata"]
    return console.home.run(str(metadata.get("namespace") or "default"), str(metadata["name"]))


def _write(file: Any, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def _form(console: Console, base: Mapping[str, Any], start: str) -> str:
    name = safe(base.get("metadata", {}).get("name", ""))
    head = (
        f'<div class="fields"><div><label>Name of the run <input name="{PREFIX}{NAME}" value="{name}" required '
        'autocomplete="off"></label></div></div>'
    )
    buttons = (
        f'<div class="bar"><button formaction="{PATH}/check" data-hx-post="{PATH}/check" data-hx-target="#result" '
        'data-hx-swap="innerHTML">Check</button><button class="main">Submit</button></div>'
    )
    hidden = f'<textarea name="base" hidden aria-hidden="true">{markup.long_text(as_yaml(base))}</textarea>'
    body = hidden + head + buttons + fields_html(base)
    form = markup.form(PATH, body, form_token=console.guard.form_token)
    empty = '<p class="soft">Check shows what the job would be: YAML, the command, the plan. It starts nothing.</p>'
    return (
        f"<h1>Submit a job</h1>{_starts(console, start)}"
        f'<div class="panes"><div>{form}{_yaml(console, base)}</div>'
        f'<section class="result" aria-label="check" aria-live="polite" id="result">{empty}</section></div>'
    )


def _starts(console: Console, start: str) -> str:
    rows = console.index.find(RunQuery(count=OFFERED)).rows
    names = [(f"{row.namespace}/{row.name}", row.name) for row in rows]
    entries = [(PATH, "the example", not start)]
    entries += [(markup.query(PATH, {"from": full}), name, full == start) for full, name in names]
    return f'<p class="soft">Start from:</p>{markup.tabs(entries, label="start from")}'


def _yaml(console: Console, base: Mapping[str, Any]) -> str:
    box = (
        f'<label for="yaml">A TrainingJob</label><textarea id="yaml" name="yaml" rows="18" spellcheck="false">'
        f"{markup.long_text(as_yaml(base))}</textarea><div class='bar'><button>Use this YAML</button></div>"
    )
    form = markup.form(f"{PATH}/load", box, form_token=console.guard.form_token)
    return f'<details class="card"><summary>Start from YAML</summary>{form}</details>'


def _result(checked: Checked, manifest: Any, settings: Sequence[str]) -> str:
    good = checked.code == ExitCode.OK
    verdict = markup.notice(
        "The job is accepted." if good else checked.errors or "The job is refused.", "" if good else "bad"
    )
    notes = markup.notice(checked.errors) if good and checked.errors else ""
    plan = f'<h2>Plan</h2><pre tabindex="0">{safe(checked.output)}</pre>' if good else ""
    words = ", ".join(settings) or "nothing"
    return (
        f"{verdict}{notes}<p class='soft'>Changed: {safe(words)}</p>"
        f"<h2>Command</h2>{markup.command(run_command('job.yaml', settings))}{plan}"
        f'<h2>YAML</h2><pre tabindex="0">{markup.long_text(as_yaml(manifest))}</pre>'
    )
