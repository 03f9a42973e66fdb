"""Submit: a form of a job that starts from an example, a run or YAML; checked by the command, then started."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from polyreme.console import markup
from polyreme.console.assets import static_text
from polyreme.console.context import Console
from polyreme.console.job_form import NAME, NAMESPACE, PREFIX, as_yaml, changed, fields_html, read_base, settings_of
from polyreme.console.route import Route
from polyreme.console.run_source import RunName, RunQuery, RunSource, Verdict
from polyreme.report.svg import safe
from polyreme_api.errors import InvalidConfigError, PolyremeError

PATH = "/submit"
EXAMPLE = "example.yaml"
OFFERED = 8
"""Runs that are offered as a start."""


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the form, from an example or from a run."""
    start, source = request.query.get("from", ""), console.source(request)
    base = await _base_of(source, start)
    form = _form(base, await _starts(source, start), console.guard.form_token_of(request))
    return console.page("Submit", form, current=PATH)


async def load(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the form from YAML."""
    base = read_base(str((await request.post()).get("yaml", "")))
    starts = await _starts(console.source(request), "")
    form = _form(base, starts, console.guard.form_token_of(request))
    return console.page("Submit", form, current=PATH)


async def check(console: Console, request: web.Request) -> web.StreamResponse:
    """Check the job as the form is now: what the command or the dry run says, its plan, its YAML."""
    form = await request.post()
    try:
        base = read_base(str(form.get("base", "")))
        settings = settings_of(base, form)
        manifest, source = changed(base, settings), console.source(request)
        part = _result(await source.check(manifest), manifest, settings, source.submit_command(settings))
    except InvalidConfigError as error:
        part = markup.notice(str(error), "bad")
    if "HX-Request" in request.headers:
        return markup.html(part)
    return console.page("Submit", f"<h1>Check of a job</h1>{part}", current=PATH)


async def submit(console: Console, request: web.Request) -> web.StreamResponse:
    """Submit the job as a run of its own."""
    form = await request.post()
    base = read_base(str(form.get("base", "")))
    run = await console.source(request).submit(changed(base, settings_of(base, form)))
    raise web.HTTPSeeOther(markup.run_path(run.namespace, run.name))


ROUTES = (
    Route(method="GET", path=PATH, handle=show, title="Submit", place=3),
    Route(method="POST", path=PATH, handle=submit),
    Route(method="POST", path=f"{PATH}/check", handle=check),
    Route(method="POST", path=f"{PATH}/load", handle=load),
)


async def _base_of(source: RunSource, start: str) -> dict[str, Any]:
    if not start:
        base = read_base(static_text(EXAMPLE))
        return base | {"metadata": base["metadata"] | ({"namespace": source.namespace} if source.namespace else {})}
    found = await source.manifest(RunName.read(start))
    metadata = found.get("metadata") or {}
    kept = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    parts: dict[str, Any] = {key: found[key] for key in ("apiVersion", "kind", "spec") if key in found}
    return parts | {"metadata": kept | {"name": _next_name(str(kept.get("name", "")))}}


def _next_name(name: str) -> str:
    """Return a name for a clone: that of its origin, with the next number."""
    found = re.fullmatch(r"(.*)-([0-9]{1,4})", name)
    return f"{found[1]}-{int(found[2]) + 1}" if found else f"{name[:240]}-2"


def _form(base: Mapping[str, Any], starts: str, form_token: str) -> str:
    name, space = (safe(base.get("metadata", {}).get(key, "")) for key in ("name", "namespace"))
    head = (
        f'<div class="fields"><div><label>Name of the run <input name="{PREFIX}{NAME}" value="{name}" required '
        'autocomplete="off"></label></div>'
        f'<div><label>Namespace <input name="{PREFIX}{NAMESPACE}" value="{space}" autocomplete="off" '
        'placeholder="default"></label></div></div>'
    )
    buttons = (
        f'<div class="bar"><button formaction="{PATH}/check" data-hx-post="{PATH}/check" data-hx-target="#result" '
        'data-hx-swap="innerHTML">Check</button><button class="main">Submit</button></div>'
    )
    hidden = f'<textarea name="base" hidden aria-hidden="true">{markup.long_text(as_yaml(base))}</textarea>'
    body = hidden + head + buttons + fields_html(base)
    form = markup.form(PATH, body, form_token=form_token)
    empty = '<p class="soft">Check shows what would be refused, plan and YAML of the job. It starts nothing.</p>'
    return (
        f"<h1>Submit a job</h1>{starts}"
        f'<div class="panes"><div>{form}{_yaml(base, form_token)}</div>'
        f'<section class="result" aria-label="check" aria-live="polite" id="result">{empty}</section></div>'
    )


async def _starts(source: RunSource, start: str) -> str:
    try:
        rows = (await source.find(RunQuery(count=OFFERED))).rows
    except PolyremeError:
        rows = ()
    entries = [(PATH, "the example", not start)]
    entries += [(markup.query(PATH, {"from": row.run.whole}), row.name, row.run.whole == start) for row in rows]
    return f'<p class="soft">Start from:</p>{markup.tabs(entries, label="start from")}'


def _yaml(base: Mapping[str, Any], form_token: str) -> str:
    box = (
        f'<label for="yaml">A TrainingJob</label><textarea id="yaml" name="yaml" rows="18" spellcheck="false">'
        f"{markup.long_text(as_yaml(base))}</textarea><div class='bar'><button>Use this YAML</button></div>"
    )
    form = markup.form(f"{PATH}/load", box, form_token=form_token)
    return f'<details class="card"><summary>Start from YAML</summary>{form}</details>'


def _result(verdict: Verdict, manifest: Any, settings: Sequence[str], command: str) -> str:
    said = markup.notice("The job is accepted.") if verdict.good else markup.notice(verdict.said or "Refused.", "bad")
    notes = "".join(markup.notice(note) for note in verdict.notes)
    plan = f'<pre tabindex="0">{safe(verdict.plan)}</pre>' if verdict.plan else "<p>There is none: it is refused.</p>"
    words = ", ".join(settings) or "nothing"
    return (
        f"<h2>Check</h2>{said}{notes}<p class='soft'>Changed: {safe(words)}. The command that does the same:</p>"
        f"{markup.command(command)}<h2>Plan</h2>{plan}"
        f'<h2>YAML</h2><pre tabindex="0">{markup.long_text(as_yaml(manifest))}</pre>'
    )
