"""Data: datasets with their versions, counts, statistics and dead letters, and what a step of a run trains on."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from polyreme.console import markup
from polyreme.console.context import Console
from polyreme.console.home.source import HomeSource
from polyreme.console.live import in_words, shown
from polyreme.console.route import Route
from polyreme.console.run_paths import run_of
from polyreme.report.parts import code, table
from polyreme.report.preview_page import build_preview
from polyreme.report.svg import safe
from polyreme.run_files.data import open_run_data, run_uid
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import checkpoint_url, read_points
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_datahub_service.stored_job import read_stored_job

PATH = "/data"
PACKS = 4
"""Packs of a step that are shown."""
PREVIEW_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox"
STATISTICS = ("samples", "images", "turns", "pairs")


async def show(console: Console, request: web.Request) -> web.StreamResponse:
    """Show the datasets, or one of them."""
    name = request.query.get("dataset", "")
    source = console.source_as(request, HomeSource)
    home = source.home
    body = await shown(lambda: source.read(lambda: _dataset(home, name) if name else _list(home)))
    head = safe(name) if name else "Data"
    return console.page(name or "Data", f"<h1>{head}</h1>{body}", current=PATH)


async def preview(console: Console, request: web.Request) -> web.StreamResponse:
    """Show what a step of a run trains on, with boxes and masks, under the page's own policy: it holds styles."""
    source = console.source_as(request, HomeSource)
    run = source.directory(run_of(request))
    text = request.query.get("step", "1")
    if not text.isascii() or not text.isdigit() or not int(text):
        raise InvalidConfigError(f"step is {text[:20]!r}, expected a number from 1 on", field="step")
    response = markup.html(await source.read(lambda: _preview(source.home, run, int(text))))
    response.headers["Content-Security-Policy"] = PREVIEW_POLICY
    return response


ROUTES = (
    Route(method="GET", path=PATH, handle=show, title="Data", place=5),
    Route(method="GET", path="/runs/{namespace}/{name}/preview", handle=preview),
)


def _list(home: Home) -> str:
    from polyreme_datahub.hub import list_datasets

    home.prepare_data()
    found = list_datasets(home.registry_url)
    rows = [
        (
            markup.link(markup.query(PATH, {"dataset": each.name}), each.name) if each.versions else safe(each.name),
            f"{each.versions:,}" if each.versions else "not used yet",
            f"{each.records:,}",
            safe(each.kind),
        )
        for each in found
    ]
    words = "<p class='soft'>In a terminal: <code>polyreme data ls</code>, <code>polyreme data register</code></p>"
    return words + table(("dataset", "#versions", "#records", "kind"), rows)


def _dataset(home: Home, name: str) -> str:
    from polyreme_datahub.hub import show_dataset

    home.prepare_data()
    details = show_dataset(home.registry_url, home.objects_url, name)
    plain = details.version.name
    versions = [
        (markup.query(PATH, {"dataset": f"{plain}@{each}"}), f"version {each}", each == details.version.number)
        for each in details.versions
    ]
    stages = [
        (safe(row.stage), f"{row.misses:,}", f"{row.hits:,}", f"{row.dead:,}", f"{row.dropped:,}")
        for row in details.stages
    ]
    letters = [
        (code(letter.sample_id), safe(letter.stage), safe(letter.rule), safe(letter.error))
        for letter in details.dead_letters
    ]
    counts = f"{details.version.records:,} records, {details.samples:,} ingested, {details.dead:,} dead letters."
    command = f"polyreme data show {details.version.reference}"
    parts = [
        markup.tabs(versions, label="versions"),
        f"<p>{counts} In a terminal: {code(command)}</p>",
        in_words(lambda: _statistics(home, details.version.reference)),
    ]
    if stages:
        heads = ("stage", "#made", "#reused", "#dead letters", "#dropped")
        parts.append("<h2>Stages, over all runs</h2>" + table(heads, stages))
    if letters:
        parts.append("<h2>Dead letters</h2>" + table(("record", "stage", "rule", "error"), letters))
    return "".join(parts)


def _statistics(home: Home, reference: str) -> str:
    from polyreme_datahub import lifecycle

    found = lifecycle.statistics(home.registry_url, home.objects_url, reference)
    counts = ", ".join(f"{found[name]:,} {name}" for name in STATISTICS if name in found)
    rows = [(name, value) for name, value in found.items() if isinstance(value, dict)]
    if not rows:
        return f"<p>{safe(counts)}</p>"
    heads = list(rows[0][1])
    cells = [(safe(name), *(_number(value.get(head)) for head in heads)) for name, value in rows]
    return f"<h2>Statistics</h2><p>{safe(counts)}</p>" + table(("of", *(f"#{head}" for head in heads)), cells)


def _number(value: Any) -> str:
    return safe(f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value)


def _preview(home: Home, run: RunDirectory, step: int) -> str:
    from polyreme_datahub.hub import read_masks
    from polyreme_datahub.loader.inspect.preview import preview as packs_of
    from polyreme_datahub.loader.open import open_steps, open_tokenizer
    from polyreme_datahub.tokenizer_file import TokenText

    if not run.exists:
        raise NotFoundError(f"no run {run.name!r} in {run.namespace!r}")
    job = read_stored_job(run.job_file)
    points = read_points(checkpoint_url(run, job))
    source, uid = open_run_data(home, run, job.spec, points[-1].mixture if points else None), run_uid(run)
    spec = open_steps(home.objects_url, job.spec, job=uid)
    if step > spec.training.steps_known:
        raise InvalidConfigError(f"no step {step}: the job trains {spec.training.steps_known:,}", field="step")
    text = TokenText(open_tokenizer(home.objects_url, spec, job=uid).content)
    masks = partial(read_masks, home.registry_url, home.objects_url)
    of_packs = source.packs_in(step)
    packs = list(packs_of(source, text, step, first=0, count=min(PACKS, of_packs), masks=masks))
    return build_preview(f"{run.name}, step {step}", packs, of_packs=of_packs)
