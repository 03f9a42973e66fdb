"""Run: what is known of it now, the actions on it with their commands."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.live import live_part, opened, stream
from polyreme.console.route import Route
from polyreme.console.run_paths import run_links, run_of, run_tabs
from polyreme.console.run_source import Number, Offer, RunName, RunSource
from polyreme.report.svg import safe
from polyreme_api.errors import InvalidConfigError

PATH = "/runs/{namespace}/{name}"
NUMBER = "number"


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show a run."""
    run, source = run_of(request), console.source(request)
    form_token = console.guard.form_token_of(request)
    part = await opened(lambda: _part(source, run, form_token))
    live = live_part(f"/live{markup.run_path(run.namespace, run.name)}", part)
    return console.page(str(run), run_tabs(source, run, "Overview") + live, current="/")


async def follow(console: Console, request: web.Request) -> web.StreamResponse:
    """Send the page's content as it changes."""
    run, source = run_of(request), console.source(request)
    form_token = console.guard.form_token_of(request)
    return await stream(console, request, lambda: _part(source, run, form_token))


async def act(console: Console, request: web.Request) -> web.StreamResponse:
    """Do what an action says."""
    run, action = run_of(request), request.match_info["action"]
    text = str((await request.post()).get(NUMBER, "")).strip()
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidConfigError(f"{text[:20]!r} is no number", field=NUMBER)
    await console.source(request).act(run, action, int(text) if text else None)
    raise web.HTTPSeeOther("/" if action == "delete" else markup.run_path(run.namespace, run.name))


ROUTES = (
    Route(method="GET", path=PATH, handle=show),
    Route(method="GET", path=f"/live{PATH}", handle=follow),
    Route(method="POST", path=f"{PATH}/actions/{{action}}", handle=act),
)


async def _part(source: RunSource, run: RunName, form_token: str) -> str:
    overview = await source.overview(run)
    return _actions(run, await source.offers(run), form_token) + overview


def _actions(run: RunName, offers: Sequence[Offer], form_token: str) -> str:
    parts = [_action(run, each, form_token) for each in offers]
    if not parts:
        return ""
    return f'<div class="actions">{"".join(parts)}{run_links(run)}</div>'


def _action(run: RunName, offer: Offer, form_token: str) -> str:
    own = markup.run_path(run.namespace, run.name, f"/actions/{offer.name}")
    button = f'<button class="{"bad" if offer.harmful else "main"}">{safe(offer.title)}</button>'
    number = "" if offer.number is None else _number(offer.number)
    body = markup.form(own, f"{number}{button}", form_token=form_token)
    return (
        f'<details name="action"><summary>{safe(offer.title)}</summary><div class="card"><p>{safe(offer.says)} '
        f"In a terminal:</p>{markup.command(offer.command)}{body}</div></details>"
    )


def _number(number: Number) -> str:
    return (
        f'<label>{safe(number.title)} <input name="{NUMBER}" inputmode="numeric" required pattern="[0-9]+" '
        f'value="{number.value}"></label> <small>{number.least:,} to {number.most:,}</small> '
    )
