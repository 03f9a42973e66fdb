"""The report: one HTML file that needs nothing else, begins with one sentence and figures, and shows what it claims."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from polyreme.report import objectives
from polyreme.report.charts import (
    COLOURS,
    experts_chart,
    loss_chart,
    smoothing_half_width,
    throughput_chart,
    timeline_chart,
)
from polyreme.report.data import AnsweredPage, AttemptRow, ReportData, TimeShare
from polyreme.report.parts import code, document, meter, table
from polyreme.report.preview_page import STYLE as PACK_STYLE
from polyreme.report.spikes import spikes
from polyreme.report.svg import safe, short_number
from polyreme.report.timeline import KINDS, end_of
from polyreme.views.formatting import NOTHING, duration, mixture_change, moment, share, size
from polyreme_api.job.accounting import Accounting, Use, ettr_of, goodput_of
from polyreme_api.step_columns import column_of, table_of

PAGES_MAX = 48
"""Pages with answers that are shown; at most half of them wrong ones."""
STAGE_COUNTS = ("processed", "reused", "dead_letters", "dropped")
OPEN_ROWS_MAX = 12
"""Stages that are shown at once; more are folded."""
LEGEND_MAX = 8
PNG_BYTES_MAX = 512 * 1024
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def build_report(data: ReportData) -> str:
    """Return the report as one HTML document without scripts and without references to anything outside it."""
    written = f"<footer>Written by polyreme on {moment(data.written_s)}.</footer>"
    style = PACK_STYLE if data.spike_packs else ""
    return document(f"{data.title}: {data.outcome}", sections(data) + written, style=style)


def sections(data: ReportData) -> str:
    """Return what the page shows, from its heading on."""
    return (
        _head(data)
        + _learning(data)
        + _objectives(data)
        + _experts(data)
        + _time(data)
        + _evaluation(data)
        + _data_plane(data)
        + _attempts(data.attempts, data.course)
        + _checkpoints(data)
        + _plan(data)
        + _job(data)
    )


def _head(data: ReportData) -> str:
    figures = data.figures
    steps = len(data.steps)
    planned = f"of {data.steps_planned:,}" if data.steps_planned else ""
    thrown = f"{len(data.thrown_away):,} trained twice" if data.thrown_away else "no step trained twice"
    cards = (
        ("Held-out correct", share(figures.held_out_ratio), _held_out_words(data)),
        ("Steps", f"{steps:,}", f"{planned}; {thrown}".removeprefix("; ")),
        ("Wall time", duration(figures.wall_s), f"{figures.attempts} attempt{'s' if figures.attempts != 1 else ''}"),
        ("Goodput", share(figures.goodput), "device time of retained steps, divided by that of all attempts"),
        (
            "Throughput",
            short_number(figures.tokens_per_second or 0) if figures.tokens_per_second else NOTHING,
            "tokens / s",
        ),
        ("Longest restart", duration(figures.restart_s), "from failure to the next step"),
    )
    boxes = "".join(f"<div><dt>{safe(a)}</dt><dd>{safe(b)}</dd><dd>{safe(c)}</dd></div>" for a, b, c in cards)
    outcome = safe(data.outcome)
    return (
        f'<span class="badge {outcome}">{outcome}</span>'
        f'<h1>{safe(data.title)}</h1><p class="lead">{safe(data.reason)}</p><dl class="figures">{boxes}</dl>'
    )


def _held_out_words(data: ReportData) -> str:
    samples = sum(held_out.samples for held_out in data.held_out)
    return f"{sum(held_out.right for held_out in data.held_out):,} of {samples:,} pages" if samples else "not evaluated"


def _learning(data: ReportData) -> str:
    picture = loss_chart(data)
    if not picture:
        return "<h2>Loss</h2><p class='soft'>No step was trained.</p>"
    key = []
    if around := smoothing_half_width(len(data.steps)):
        key = ['<li><i class="thin"></i>each step</li>']
        key.append(f'<li><i class="bold"></i>smoothed: mean of {around} steps before and after</li>')
    numbers = sorted(set(column_of(data.steps, "attempt")))
    key += [f'<li><i class="line c{n % COLOURS}"></i>attempt {n}</li>' for n in numbers[:LEGEND_MAX]]
    if len(numbers) > LEGEND_MAX:
        key.append(f"<li>and {len(numbers) - LEGEND_MAX} more</li>")
    if data.thrown_away:
        key.append('<li><i class="dashed"></i>trained, lost, retrained</li>')
    if table_of(data.steps).sparse("held_out"):
        key.append('<li><i class="dot"></i>held out</li>')
    words = _stage_words(data) + _mixture_words(data)
    return f'<h2>Loss</h2>{words}<div class="card">{picture}<ul class="key">{"".join(key)}</ul></div>{spikes(data)}'


def _objectives(data: ReportData) -> str:
    measured = objectives.rows(data.steps)
    if not measured:
        return ""
    return "<h2>Objective</h2>" + table(("measure", "#at first", "#at last", "over the steps"), measured)


def _stage_words(data: ReportData) -> str:
    if not data.training_stages:
        return ""
    listed = "; ".join(
        f"{stage.name}, steps {stage.first_step} to {stage.last_step}"
        + (f", {' and '.join(stage.trains)} alone" if stage.trains else "")
        for stage in data.training_stages
    )
    return f'<p class="soft">Trained in stages ({safe(listed)}).</p>'


def _mixture_words(data: ReportData) -> str:
    changes = [change for change in data.mixture if change.step > 1]
    listed = "; ".join(
        mixture_change(change.step, change.weights, change.skip_steps) for change in changes[:LEGEND_MAX]
    )
    words = [f"The mixture of sources changed during the run ({listed})."] if changes else []
    words += [f"Weights are {data.weights_are}."] if data.weights_are else []
    return f'<p class="soft">{safe(" ".join(words))}</p>' if words else ""


def _experts(data: ReportData) -> str:
    loads = data.experts
    if loads is None:
        return ""
    busiest = max((max(layer.load) * len(layer.load) / max(1, sum(layer.load)) for layer in loads.layers), default=0.0)
    dropped = sum(layer.dropped for layer in loads.layers)
    entropies = [layer.entropy for layer in loads.layers]
    words = (
        f"Steps {loads.first_step:,} to {loads.last_step:,}, {len(loads.layers)} layers: busiest expert: "
        f"{100 * (busiest - 1):.0f} % above the average of its layer; "
        f"entropy of the scores {min(entropies):.2f} to {max(entropies):.2f} nats; {dropped:,} rows dropped."
    )
    picture = experts_chart(data)
    card = f'<div class="card">{picture}</div>' if picture else ""
    return f'<h2>Experts</h2><p class="soft">{safe(words)}</p>{card}'


def _time(data: ReportData) -> str:
    timeline, throughput = timeline_chart(data), throughput_chart(data)
    if not timeline and not throughput:
        return ""
    words = {"training": "retained training steps", "finishing": "evaluating and exporting"}
    key = "".join(
        f'<li><i class="{kind}"></i>{words.get(kind, kind)}</li>' for kind in KINDS if f'"span {kind}"' in timeline
    )
    parts = [
        f'<h2>Time</h2><div class="card">{timeline}<ul class="key">{key}</ul></div>' if timeline else "<h2>Time</h2>"
    ]
    if throughput:
        parts.append(f'<h3>Tokens per second</h3><div class="card">{throughput}</div>')
    if data.time_shares:
        parts.append(_time_shares(data.time_shares))
    parts.append(_device_time(data.accounting))
    return "".join(parts)


def _time_shares(shares: Sequence[TimeShare]) -> str:
    total_s = sum(part.seconds for part in shares) or 1.0
    cells = [
        (
            safe(part.name),
            duration(part.seconds),
            share(part.seconds / total_s),
            meter(part.seconds / total_s, "" if part.counts else "bad"),
        )
        for part in shares
    ]
    return "<h3>Where the time went</h3>" + table(("spent on", "#time", "#share", ""), cells)


def _device_time(accounting: Accounting) -> str:
    if not accounting.cells:
        return ""
    cells = sorted(accounting.cells, key=lambda cell: -cell.device_milliseconds)
    total = sum(cell.device_milliseconds for cell in cells)
    rows = [
        (
            safe(cell.what),
            safe(cell.why or NOTHING),
            duration(cell.device_milliseconds / 1_000),
            share(cell.device_milliseconds / total),
            meter(cell.device_milliseconds / total, "" if cell.what == Use.PRODUCTIVE else "bad"),
        )
        for cell in cells
    ]
    goodput, ettr = share(goodput_of(accounting.table)), share(ettr_of(accounting.table))
    words = f"Charged until the last settlement or end of an attempt: goodput {goodput}, ETTR {ettr}."
    heads = ("spent on", "why", "#time x devices", "#share", "")
    return f'<h3>Device time</h3><p class="soft">{words}</p>' + table(heads, rows)


def _evaluation(data: ReportData) -> str:
    if not data.held_out and not data.pages:
        return ""
    rows = [
        (
            safe(held_out.name),
            f"{held_out.right:,} of {held_out.samples:,}",
            share(held_out.right / held_out.samples) if held_out.samples else NOTHING,
            meter(held_out.right / held_out.samples if held_out.samples else 0.0, ""),
        )
        for held_out in data.held_out
    ]
    results = table(("set", "#right", "#share", ""), rows) if rows else ""
    shown = shown_pages(data.pages)
    more = f'<p class="soft">{len(shown)} of {len(data.pages):,} pages.</p>' if len(shown) < len(data.pages) else ""
    gallery = f'<h3>Pages and what the model answered</h3>{more}<div class="pages">{"".join(map(_page, shown))}</div>'
    return (
        '<h2>Held-out evaluation</h2><p class="soft">Pages that were never trained on, answered by free-running greedy '
        f"decoding; right means exactly the expected text.</p>{results}{gallery if shown else ''}"
    )


def shown_pages(pages: Sequence[AnsweredPage]) -> list[AnsweredPage]:
    """Choose the pages to show: wrong answers first, then right ones, spread evenly over all of them."""
    wrong = _spread([page for page in pages if not page.right], PAGES_MAX // 2)
    return wrong + _spread([page for page in pages if page.right], PAGES_MAX - len(wrong))


def _spread(pages: Sequence[AnsweredPage], most: int) -> list[AnsweredPage]:
    if len(pages) <= most:
        return list(pages)
    return [pages[index * len(pages) // most] for index in range(most)]


def _page(page: AnsweredPage) -> str:
    kind = "right" if page.right else "wrong"
    is_picture = page.png.startswith(_PNG_SIGNATURE) and len(page.png) <= PNG_BYTES_MAX
    encoded = base64.b64encode(page.png).decode("ascii")
    picture = f'<img alt="{safe(page.question)}" src="data:image/png;base64,{encoded}">' if is_picture else "no picture"
    expected = "" if page.right else f"<br><del>expected {safe(page.expected)}</del>"
    mark = "✓" if page.right else "✗"
    answer = safe(page.answer) or "(nothing)"
    asked = f"{page.set_name}: {page.question}" if page.set_name else page.question
    return (
        f'<figure class="{kind}"><div class="paper">{picture}</div><figcaption>'
        f'<span class="soft">{safe(asked)}</span><br><b>{mark} {answer}</b>{expected}</figcaption></figure>'
    )


def _data_plane(data: ReportData) -> str:
    if not data.stages and not data.dead_letters and not data.damage and not data.visits:
        return ""
    stages = [
        (safe(row.dataset), safe(row.stage), *(f"{getattr(row, name):,}" for name in STAGE_COUNTS))
        for row in data.stages
    ]
    done = table(("dataset", "stage", *(f"#{name.replace('_', ' ')}" for name in STAGE_COUNTS)), stages)
    if len(stages) > OPEN_ROWS_MAX:
        done = f"<details><summary>{len(stages):,} stages</summary>{done}</details>"
    parts = ["<h2>Data</h2>", f"<p>{_data_words(data)}</p>", done if stages else "", _visits(data)]
    if data.damage:
        found = "".join(f"<li>{safe(words)}</li>" for words in data.damage)
        parts += ["<h3>Damaged data</h3>", f"<ul>{found}</ul>"]
    if data.dead_letters:
        letters = [(safe(row.dataset), safe(row.stage), code(row.record), safe(row.error)) for row in data.dead_letters]
        parts += [
            "<h3>Dead letters</h3>",
            "<p class='soft'>Records that could not be processed; training continued without them.</p>",
        ]
        parts.append(table(("dataset", "stage", "record", "error"), letters))
    return "".join(parts)


def _visits(data: ReportData) -> str:
    rows = [
        (
            safe(of.source),
            f"{of.epochs:.2f}",
            f"{of.least:,}",
            f"{of.most:,}",
            f"{'' if of.exact else 'about '}{of.unseen:,}",
        )
        for of in data.visits
    ]
    heads = ("source", "#epochs", "#visits, least", "#most", "#samples never seen")
    words = "<p class='soft'>How often the samples of each source that fit a pack were trained on.</p>"
    return "<h3>Visits</h3>" + words + table(heads, rows) if rows else ""


def _data_words(data: ReportData) -> str:
    datasets = len({row.dataset for row in data.stages})
    processed, reused = (sum(getattr(row, name) for row in data.stages) for name in ("processed", "reused"))
    letters = sum(row.dead_letters for row in data.stages) or len(data.dead_letters)
    return (
        f"{datasets:,} dataset{'' if datasets == 1 else 's'}: {processed:,} results computed, "
        f"{reused:,} reused from earlier runs, "
        f"{letters:,} dead letter{'' if letters == 1 else 's'}."
    )


def _attempts(attempts: Sequence[AttemptRow], course: Sequence[str]) -> str:
    rows = [
        (
            str(attempt.number),
            safe(attempt.scope),
            moment(attempt.started_s),
            NOTHING if attempt.first_step is None else f"{attempt.first_step:,} to {attempt.last_step or 0:,}",
            NOTHING if attempt.ended_s is None else duration(attempt.ended_s - attempt.started_s),
            f"{safe(end_of(attempt))} <small>{safe(attempt.message)}</small>",
        )
        for attempt in attempts
    ]
    said = "".join(f"<p>{safe(words)}</p>" for words in course)
    return f"<h2>Attempts</h2>{said}" + table(("#", "how", "started", "#steps", "#took", "end"), rows) if rows else ""


def _checkpoints(data: ReportData) -> str:
    rows = [
        (code(row.name), size(row.size_bytes), "committed" if row.committed else "torn, never loaded")
        for row in data.checkpoints
    ]
    return "<h2>Checkpoints</h2>" + table(("name", "#size", "state"), rows) if rows else ""


def _plan(data: ReportData) -> str:
    plan = data.plan
    environment = [(safe(name), safe(value)) for name, value in data.environment.items()]
    if plan is None:
        return "<h2>Environment</h2>" + table(("part", "version"), environment) if environment else ""
    recomputed = f" Recomputed in the backward pass: {plan.recompute_label.lower()}." if plan.recompute_label else ""
    words = (
        f"<p>{code(plan.shape.name)} on {plan.layout.world} ranks: {plan.replicas} workers with {plan.devices} "
        f"devices each, layout {code(str(plan.layout))}, {plan.packs_per_step} packs of {plan.pack_tokens:,} tokens a "
        f"step.{recomputed} Plan {code(plan.hash)}.</p>"
    )
    volumes = [
        (safe(volume.axis), f"{volume.ranks:,}", size(volume.bytes_per_rank), f"{volume.messages:,}")
        for volume in plan.volumes
    ]
    groups = table(("group", "#ranks", "#sent by a rank in a step", "#collectives"), volumes) if volumes else ""
    return f"<h2>Plan</h2>{words}{groups}" + (
        "<h3>Environment</h3>" + table(("part", "version"), environment) if environment else ""
    )


def _job(data: ReportData) -> str:
    if not data.job_yaml:
        return ""
    return f"<h2>Job</h2><details><summary>TrainingJob</summary><pre tabindex='0'>{safe(data.job_yaml)}</pre></details>"
