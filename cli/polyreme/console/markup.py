"""Parts of the console's pages: the page itself, notices, badges, forms. All text of others is escaped."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlencode

from aiohttp import web

from polyreme.console.assets import SCRIPT, STYLE
from polyreme.console.guard import FORM_TOKEN
from polyreme.report.svg import CHARACTERS_MAX, safe

VERSION = importlib.metadata.version("polyreme")
_HTMX = (
    '{"includeIndicatorCSS":false,"extensions":"sse","history":false,"morphIgnore":["data-htmx-powered","open"],'
    '"sse":{"reconnectMaxDelay":5000,"connectTimeout":20000}}'
)
"""Settings of htmx: what a person has unfolded stays so when a live part changes; times are in milliseconds."""


def page(title: str, body: str, *, navigation: Sequence[tuple[str, str]], current: str = "") -> str:
    """Return a whole page.

    Args:
        title: In the browser's tab.
        body: HTML, with one ``h1``.
        navigation: Path and title of each entry.
        current: Path of the entry that the page belongs to.
    """
    entries = "".join(
        f'<a href="{safe(path)}"{" aria-current=page" if path == current else ""}>{safe(name)}</a>'
        for path, name in navigation
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{safe(title)} - polyreme</title>'
        f'<meta name="htmx-config" content="{safe(_HTMX)}"><link rel="icon" href="data:,">'
        f'<link rel="stylesheet" href="/assets/{safe(VERSION)}/{STYLE}">'
        f'<script defer src="/assets/{safe(VERSION)}/{SCRIPT}"></script></head>\n'
        '<body><a class="skip" href="#main">Skip to the content</a><header class="top">'
        f'<nav aria-label="pages"><b>polyreme</b>{entries}</nav></header>'
        f'<main id="main" tabindex="-1">{body}</main></body></html>\n'
    )


def html(text: str, *, status: int = 200) -> web.Response:
    """Answer with HTML."""
    response = web.Response(text=text, status=status, content_type="text/html")
    response.enable_compression()
    return response


def notice(words: str, kind: str = "") -> str:
    """Show a sentence; ``kind`` is ``good``, ``bad`` or nothing."""
    role = "alert" if kind == "bad" else "status"
    return f'<div class="notice {safe(kind)}" role="{role}"><p>{safe(words)}</p></div>'


def long_text(text: str) -> str:
    """Escape a text that is longer than what is escaped at once."""
    return "".join(safe(text[at : at + CHARACTERS_MAX]) for at in range(0, len(text), CHARACTERS_MAX))


def badge(state: str) -> str:
    """Show a state."""
    return f'<span class="badge {safe(state)}">{safe(state)}</span>'


def progress(step: object, steps: object) -> str:
    """Draw how far a run is; nothing where that is not known."""
    if not isinstance(step, int) or not isinstance(steps, int) or steps <= 0:
        return ""
    width = min(max(step / steps, 0.0), 1.0) * 100
    return (
        '<svg class="meter progress" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:.1f}" height="8"/></svg>'
    )


def form(action: str, body: str, *, form_token: str) -> str:
    """Return a form that changes something."""
    hidden = f'<input type="hidden" name="{FORM_TOKEN}" value="{safe(form_token)}">'
    return f'<form method="post" action="{safe(action)}">{hidden}{body}</form>'


def command(words: str) -> str:
    """Show the command that does the same."""
    return f'<pre tabindex="0" aria-label="command">{safe(words)}</pre>'


def link(path: str, text: str, *, classes: str = "") -> str:
    """Return a link to a page of this console."""
    named = f' class="{safe(classes)}"' if classes else ""
    return f'<a{named} href="{safe(path)}">{safe(text)}</a>'


def run_path(namespace: str, name: str, rest: str = "") -> str:
    """Return the path of a run's page."""
    return f"/runs/{quote(namespace, safe='')}/{quote(name, safe='')}{rest}"


def query(path: str, values: Mapping[str, str | Sequence[str]]) -> str:
    """Return a path with a query; empty values are left out."""
    kept = {name: value for name, value in values.items() if value}
    return f"{path}?{urlencode(kept, doseq=True)}" if kept else path


def tabs(entries: Sequence[tuple[str, str, bool]], *, label: str) -> str:
    """Return links: path, text, and whether it is the current one."""
    links = "".join(
        f'<a href="{safe(path)}"{" aria-current=true" if current else ""}>{safe(text)}</a>'
        for path, text, current in entries
    )
    return f'<nav class="tabs" aria-label="{safe(label)}">{links}</nav>'
