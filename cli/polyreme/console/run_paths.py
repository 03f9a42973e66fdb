"""Runs by the paths of their pages, and the links between those."""

from __future__ import annotations

import re

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.run_files.paths import RunDirectory
from polyreme_api.errors import NotFoundError

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_TABS = (("Overview", ""), ("Logs", "/logs"), ("What a step trains on", "/preview?step=1"), ("Report", "/report"))


def run_of(console: Console, request: web.Request) -> RunDirectory:
    """Return the run that a path names; it may be one that was submitted and does not exist yet.

    Raises:
        NotFoundError: If a name is none of a run.
    """
    return run_named(console, f"{request.match_info['namespace']}/{request.match_info['name']}")


def run_named(console: Console, name: str) -> RunDirectory:
    """Return the run of ``namespace/name``, or of a name alone; it may not exist.

    Raises:
        NotFoundError: If that is no name of a run.
    """
    namespace, _, short = name.rpartition("/")
    namespace = namespace or "default"
    if not all(_NAME.fullmatch(part) for part in (namespace, short)):
        raise NotFoundError(f"no run {name[:128]!r}: names have letters, digits, dots and hyphens alone")
    return console.home.run(namespace, short)


def run_tabs(run: RunDirectory, current: str) -> str:
    """Return links to the pages of a run."""
    own = markup.run_path(run.namespace, run.name)
    return markup.tabs([(own + rest, text, text == current) for text, rest in _TABS], label="of this run")
