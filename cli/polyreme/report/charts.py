"""The report's pictures over steps and over time: loss, attempts, throughput."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Sequence

from polyreme.report import svg
from polyreme.report.data import AttemptRow, MixtureWeights, ReportData, TrainedStage
from polyreme.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale
from polyreme.report.timeline import attempt_spans, end_of
from polyreme.views.formatting import clock, duration, mixture_change, share, short_weights
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import StepTable, by_attempt, column_of, held_out_losses, table_of

COLOURS = 6
"""Colours of attempts, which then repeat; the style sheet has one variable for each."""
ATTEMPTS_MAX = 60
"""Attempts that the timeline shows, the newest; a sentence counts the others."""
MARKS_MAX = 40
SMOOTHED_SHARE = 60
"""The smoothed line takes the mean of one step in so many before and after each; a shorter run is not smoothed."""
SMOOTHED_MAX = 25
HEATS = 9
"""Shades of the experts' loads: none, the mean in the middle, twice the mean and more."""
CELLS_MAX = 4096
_CELL_PX = 22
_LOSS_PX = 380
_RATE_PX = 240
_ROW_PX = 30
_BUCKETS = 160


def loss_chart(data: ReportData) -> str:
    """Draw the loss over steps: history by attempt, thrown-away steps dashed, held-out loss, resume points, borders."""
    losses = [*_losses(data.steps), *_losses(data.thrown_away)]
    finite = [loss for _, loss in losses if math.isfinite(loss)]
    if not finite:
        return ""
    held_out = held_out_losses(data.steps)
    finite += [loss for _, loss in held_out if math.isfinite(loss)]
    logarithmic = min(finite) > 0
    y = _y_scale(min(finite), max(finite), bottom=_LOSS_PX - BOTTOM, logarithmic=logarithmic)
    last = max([data.steps_planned, *(step for step, _ in losses)])
    x = Scale(low=0, high=last, from_px=LEFT, to_px=WIDTH - RIGHT)
    parts = [svg.frame(x, y, name_x="step", name_y="loss, log scale" if logarithmic else "loss")]
    parts += _mixture_marks(data.mixture, x=x, y=y)
    parts += [
        svg.line(
            _drawn(_losses(records), x, y), f"lost-line c{attempt % COLOURS}", title=f"attempt {attempt}, discarded"
        )
        for attempt, records in by_attempt(data.thrown_away).items()
    ]
    borders = {change.step for change in data.mixture} | {stage.first_step for stage in data.training_stages}
    smooth = smoothed(data.steps, borders)
    for attempt, records in by_attempt(data.steps).items():
        parts.append(svg.line(_drawn(_losses(records), x, y), f"raw c{attempt % COLOURS}"))
        trend = [(step, smooth[step]) for step in records.column("step") if step in smooth]
        parts.append(svg.line(_drawn(trend, x, y), f"trend c{attempt % COLOURS}", title=f"attempt {attempt}"))
    marks = _drawn(held_out, x, y)
    parts += [svg.line(marks, "held-out", title="held-out loss")] if len(marks) > 1 else []
    parts += [svg.dot(at, height, "held-out", title="held-out loss") for at, height in marks[:MARKS_MAX]]
    parts += _stage_marks(data.training_stages, x=x, y=y)
    parts += _resume_marks(data, x=x, y=y)
    parts += [
        svg.dot(x(step), y.to_px, "bad", title=f"step {step}: loss {loss}")
        for step, loss in [each for each in losses if not math.isfinite(each[1])][: svg.POINTS_MAX]
    ]
    return svg.picture(parts, height=_LOSS_PX, says=f"Loss over {last} steps, coloured by attempt")


def timeline_chart(data: ReportData) -> str:
    """Draw what each attempt did over wall time, one row an attempt."""
    attempts = data.attempts[-ATTEMPTS_MAX:]
    if not attempts:
        return ""
    start_s = min(attempt.started_s for attempt in data.attempts)
    end_s = max([start_s + data.figures.wall_s, *(attempt.ended_s or attempt.started_s for attempt in attempts)])
    height = TOP + _ROW_PX * len(attempts) + BOTTOM
    x = Scale(low=0, high=max(end_s - start_s, 1e-3), from_px=LEFT, to_px=WIDTH - RIGHT)
    y = Scale(low=0, high=1, from_px=height - BOTTOM, to_px=TOP)
    parts = [
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{y.to_px}" y2="{y.from_px}"/>'
        + svg.label(x(tick), y.from_px + 18, clock(tick), "tick", anchor="middle")
        for tick in _time_ticks(x.high)
    ]
    parts.append(svg.label(x.to_px, y.from_px + 32, "wall time", "name", anchor="end"))
    kept, lost = by_attempt(data.steps), by_attempt(data.thrown_away)
    for row, attempt in enumerate(attempts):
        spans = attempt_spans(
            attempt,
            committed=kept.get(attempt.number, ()),
            thrown_away=lost.get(attempt.number, ()),
            now_s=end_s,
        )
        at = TOP + row * _ROW_PX
        number = attempt.number
        parts.append(svg.label(LEFT - 10, at + 19, str(number), f"row c{number % COLOURS}", anchor="end"))
        for span in spans:
            left, right = x(span.from_s - start_s), x(span.until_s - start_s)
            words = f"attempt {number}: {span.kind}, {duration(span.seconds)}"
            parts.append(svg.bar(left, at + 4, max(right - left, 1), _ROW_PX - 10, f"span {span.kind}", title=words))
        parts.append(_row_words(attempt, x=x, at=at, end_s=(attempt.ended_s or end_s) - start_s))
    says = f"Timeline of {len(attempts)} attempts; goodput {share(data.figures.goodput)}"
    return svg.picture(parts, height=height, says=says)


def throughput_chart(data: ReportData) -> str:
    """Draw trained tokens a second over wall time; pauses show as gaps, thrown-away work in grey."""
    tables = table_of(data.steps), table_of(data.thrown_away)
    ends_s, took_s, tokens = (
        [value for table in tables for value in table.column(name)] for name in ("ended_at_s", "step_s", "tokens")
    )
    if not any(tokens):
        return ""
    start_s = min([*(attempt.started_s for attempt in data.attempts), *map(operator.sub, ends_s, took_s)])
    end_s = max(ends_s)
    width_s = max((end_s - start_s) / _BUCKETS, 1e-3)
    kept, lost = (_rates(table, start_s=start_s, width_s=width_s) for table in tables)
    most = max(a + b for a, b in zip(kept, lost, strict=True))
    x = Scale(low=0, high=max(end_s - start_s, data.figures.wall_s, 1e-3), from_px=LEFT, to_px=WIDTH - RIGHT)
    y = Scale(low=0, high=most * 1.08, from_px=_RATE_PX - BOTTOM, to_px=TOP)
    above = [a + b for a, b in zip(kept, lost, strict=True)]
    parts = [
        svg.frame(x, y, write_x=None, name_x="wall time", name_y="tokens / s"),
        *(svg.label(x(tick), y.from_px + 18, clock(tick), "tick", anchor="middle") for tick in _time_ticks(x.high)),
        svg.area(_stairs(above, x, y, width_s), "rate-lost", base_px=y.from_px),
        svg.area(_stairs(kept, x, y, width_s), "rate", base_px=y.from_px),
    ]
    return svg.picture(parts, height=_RATE_PX, says="Tokens per second over wall time")


def experts_chart(data: ReportData) -> str:
    """Draw how many rows each expert of each layer got, a cell each, darker for more; their layers' mean is the middle.

    A model with more cells than a page should hold is described in words alone.
    """
    loads = data.experts
    if loads is None or not 0 < sum(len(layer.load) for layer in loads.layers) <= CELLS_MAX:
        return ""
    most = max(len(layer.load) for layer in loads.layers)
    width = (WIDTH - LEFT - RIGHT) / max(1, most)
    parts = [svg.label(WIDTH - RIGHT, TOP - 6, "expert", "name", anchor="end")]
    for row, layer in enumerate(loads.layers):
        at = TOP + row * _CELL_PX
        mean = sum(layer.load) / max(1, len(layer.load))
        parts.append(svg.label(LEFT - 8, at + _CELL_PX - 6, f"layer {layer.layer}", "tick", anchor="end"))
        for expert, rows in enumerate(layer.load):
            ratio = rows / mean if mean else 0.0
            heat = min(HEATS - 1, round(ratio * (HEATS - 1) / 2))
            words = f"layer {layer.layer}, expert {expert}: {rows:,} rows, {ratio:.2f} of the mean"
            parts.append(svg.bar(LEFT + expert * width, at, width - 1, _CELL_PX - 2, f"cell h{heat}", title=words))
    height = TOP + _CELL_PX * len(loads.layers) + 8
    return svg.picture(parts, height=height, says=f"Rows of each expert of {len(loads.layers)} layers")


def _y_scale(low: float, high: float, *, bottom: float, logarithmic: bool) -> Scale:
    if logarithmic:
        low, high = low / 1.15, high * 1.15
    else:
        margin = (high - low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    return Scale(low=low, high=high, from_px=bottom, to_px=TOP, logarithmic=logarithmic)


def _losses(records: Sequence[StepRecord]) -> Iterable[tuple[int, float]]:
    return zip(column_of(records, "step"), column_of(records, "loss"), strict=True)


def _drawn(losses: Iterable[tuple[int, float]], x: Scale, y: Scale) -> list[svg.Point]:
    """Return the places of finite losses, of many steps those of the extremes alone."""
    finite = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    return [(x(step), y(loss)) for step, loss in svg.thin(finite)]


def smoothing_half_width(steps: int) -> int:
    """Steps before and after each that the smoothed line averages; 0: the run is too short to smooth."""
    return min(SMOOTHED_MAX, steps // SMOOTHED_SHARE)


def smoothed(records: Sequence[StepRecord], borders: Collection[int] = ()) -> dict[int, float]:
    """Centred mean over the history: it neither lags the loss nor breaks where attempts change.

    No window reaches over a border, a step from which on something else is trained. Towards borders and both ends the
    window shrinks on both sides alike, so the line begins and ends at the loss itself.
    """
    half = smoothing_half_width(len(records))
    parts: list[list[tuple[int, float]]] = [[]]
    for step, loss in _losses(records):
        if step in borders:
            parts.append([])
        if math.isfinite(loss):
            parts[-1].append((step, loss))
    smooth = {}
    for part in parts:
        sums = [0.0, *itertools.accumulate(loss for _, loss in part)]
        for at, (step, _) in enumerate(part):
            around = min(half, at, len(part) - 1 - at)
            smooth[step] = (sums[at + around + 1] - sums[at - around]) / (2 * around + 1)
    return smooth


def _mixture_marks(mixture: Sequence[MixtureWeights], *, x: Scale, y: Scale) -> list[str]:
    changes = [(x(change.step), change) for change in mixture if change.step > 1][:MARKS_MAX]
    rules = [
        svg.rule(
            at, y.to_px, y.from_px, "mixture", title=mixture_change(change.step, change.weights, change.skip_steps)
        )
        for at, change in changes
    ]
    texts = [(at, short_weights(change.weights)) for at, change in changes]
    return [*rules, svg.labels(texts, y=y.to_px + 10, to_px=x.to_px)]


def _stage_marks(stages: Sequence[TrainedStage], *, x: Scale, y: Scale) -> list[str]:
    """Name each curriculum stage where it begins, at the lower end, and draw its border."""
    rules = [
        svg.rule(
            x(stage.first_step), y.to_px, y.from_px, "stage", title=f"stage {stage.name} from step {stage.first_step}"
        )
        for stage in stages[:MARKS_MAX]
        if stage.first_step > 1
    ]
    texts = [(x(stage.first_step), stage.name) for stage in stages[:MARKS_MAX]]
    return [*rules, svg.labels(texts, y=y.from_px - 22, to_px=x.to_px, row_px=-13)]


def _resume_marks(data: ReportData, *, x: Scale, y: Scale) -> list[str]:
    parts: list[str] = []
    texts: list[tuple[float, str]] = []
    attempts = column_of(data.steps, "attempt")
    changes = [at for at in range(1, len(attempts)) if attempts[at] != attempts[at - 1]]
    for before, after in ((data.steps[at - 1], data.steps[at]) for at in changes):
        if math.isfinite(before.loss) and len(parts) < MARKS_MAX:
            words = f"attempt {after.attempt} resumes after step {before.step}"
            at = x(before.step)
            texts.append((at, f"resumed after {before.step}"))
            parts.append(
                svg.rule(at, y.to_px, y.from_px, f"resume c{after.attempt % COLOURS}", title=words)
                + svg.dot(at, y(before.loss), f"resume c{after.attempt % COLOURS}", title=words)
            )
    return [*parts, svg.labels(texts, y=y.from_px - 8, to_px=x.to_px, rows=1)]


def _row_words(attempt: AttemptRow, *, x: Scale, at: float, end_s: float) -> str:
    words = end_of(attempt)
    right = x(end_s)
    if right > x.to_px - 150:
        return svg.label(right - 6, at + 19, words, "on-bar", anchor="end")
    return svg.label(right + 6, at + 19, words, "mark")


def _rates(table: StepTable, *, start_s: float, width_s: float) -> list[float]:
    """Spread each step's tokens over the buckets of wall time that it took."""
    rates = [0.0] * (_BUCKETS + 1)
    for end_s, step_s, tokens in zip(*map(table.column, ("ended_at_s", "step_s", "tokens")), strict=True):
        until = min(max((end_s - start_s) / width_s, 0.0), float(_BUCKETS))
        since = max(until - max(step_s / width_s, 1e-9), 0.0)
        length = max(until - since, 1e-9)
        for bucket in range(math.floor(since), min(math.ceil(until), _BUCKETS)):
            overlap = min(until, bucket + 1) - max(since, bucket)
            rates[bucket] += tokens * max(overlap, 0.0) / length / width_s
    return rates


def _stairs(rates: Sequence[float], x: Scale, y: Scale, width_s: float) -> list[svg.Point]:
    points: list[svg.Point] = []
    for bucket, rate in enumerate(rates[:_BUCKETS]):
        points += [(x(bucket * width_s), y(rate)), (x((bucket + 1) * width_s), y(rate))]
    return points


def _time_ticks(length_s: float) -> list[float]:
    """Return round times: 1, 2, 5, 10, 15, 30 s or min, whole hours."""
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400]
    step = next((step for step in steps if length_s / step <= 9), math.ceil(length_s / 9 / 86_400) * 86_400)
    return [float(index * step) for index in range(math.floor(length_s / step) + 1)]
