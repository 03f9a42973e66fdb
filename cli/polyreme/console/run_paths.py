"""Names of runs in the paths of their pages, and the links between those."""

from __future__ import annotations

from aiohttp import web

from polyreme.console import markup
from polyreme.console.run_source import RunName, RunSource


def run_of(request: web.Request) -> RunName:
    """Return the name of the run that a path names.

    Raises:
        NotFoundError: If it is no name of a run.
    """
    return RunName.read(f"{request.match_info['namespace']}/{request.match_info['name']}")


def run_tabs(source: RunSource, run: RunName, current: str) -> str:
    """Return links to the pages of a run."""
    own = markup.run_path(run.namespace, run.name)
    entries = [("Overview", own), ("Logs", f"{own}/logs"), *source.pages(run)]
    return markup.tabs([(path, text, text == current) for text, path in entries], label="of this run")


def run_links(run: RunName) -> str:
    """Return links to pages that begin with a run."""
    clone = markup.link(markup.query("/submit", {"from": run.whole}), "Clone with changes", classes="button")
    return clone + markup.link(markup.query("/compare", {"run": [run.whole]}), "Compare", classes="button")
