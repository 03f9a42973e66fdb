"""Pictures of a comparison: curves of several runs, and the fields that differ as parallel axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.console.run_source import Curve, RunCurves, RunName
from polyreme.report import svg
from polyreme.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Scale
from polyreme.views.formatting import NOTHING

COLOURS = 8
AXES_MAX = 8
VALUES_MAX = 24
"""Different texts on one axis; of more the axis is left out."""
_HEIGHT = 380
_PARALLEL_PX = 320
_LABEL_CHARACTERS = 18


def curves_chart(curves: Mapping[RunName, Curve], *, measure: str, axis: str) -> str:
    """Draw a measure of the runs over steps, tokens or hours."""
    runs, lines = list(curves), [_finite(curve, measure, axis) for curve in curves.values()]
    points = [point for line in lines for point in line]
    if not points:
        return f'<p class="soft">No run has a {svg.safe(measure)}.</p>'
    low, high = min(y for _, y in points), max(y for _, y in points)
    logarithmic = low > 0 and high / low > 3
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    bounds = (low / 1.1, high * 1.1) if logarithmic else (low - margin, high + margin)
    y = Scale(low=bounds[0], high=bounds[1], from_px=_HEIGHT - BOTTOM, to_px=TOP, logarithmic=logarithmic)
    x = Scale(low=0, high=max(x for x, _ in points) or 1.0, from_px=LEFT, to_px=WIDTH - RIGHT)
    name = f"{measure}, log scale" if logarithmic else measure
    parts = [svg.frame(x, y, name_x=axis, name_y=name)]
    parts += [
        svg.line(svg.thin([(x(a), y(b)) for a, b in line]), f"thick c{at % COLOURS}", title=runs[at].name)
        for at, line in enumerate(lines)
    ]
    names = ", ".join(run.name for run in runs[:COLOURS])
    return svg.picture(parts, height=_HEIGHT, says=f"{measure} over {axis} of {names}")


def parallel_chart(runs: Sequence[RunCurves], fields: Sequence[str], *, result: str, title: str) -> str:
    """Draw each run as a line through its values of the fields that differ, and its result on the last axis.

    Args:
        runs: Each is a line.
        fields: Of the spec.
        result: Figure on the last axis.
        title: Of that axis.
    """
    columns = [(field, [each.compared.spec.get(field) for each in runs]) for field in fields]
    columns = [(field, values) for field, values in columns if len(set(map(str, values))) <= VALUES_MAX]
    columns = [*columns[: AXES_MAX - 1], (title, [each.compared.figures.get(result) for each in runs])]
    if len(columns) < 2:
        return ""
    gap = (WIDTH - 2 * 90) / (len(columns) - 1)
    parts, places = [], []
    for at, (field, values) in enumerate(columns):
        x = 90 + at * gap
        marks, heights = _axis(values)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 16}" y2="{_PARALLEL_PX - 16}"/>')
        short = field.rpartition(".")[2][:_LABEL_CHARACTERS]
        parts.append(svg.label(x, TOP, short, "name", anchor="middle"))
        parts += [svg.label(x - 6, height + 4, text, "tick", anchor="end") for height, text in marks]
        places.append((x, heights))
    for number in range(len(runs)):
        line = [(x, heights[number]) for x, heights in places if heights[number] is not None]
        points = [(x, float(height)) for x, height in line if height is not None]
        parts.append(svg.line(points, f"thick c{number % COLOURS}", title=runs[number].run.name))
    says = f"{len(runs)} runs over {', '.join(field for field, _ in columns)}"
    return svg.picture(parts, height=_PARALLEL_PX, says=says)


def _finite(curve: Curve, measure: str, axis: str) -> list[svg.Point]:
    over = {"step": curve.step, "tokens": curve.tokens, "hours": curve.hours}[axis]
    both = zip(over, curve.values.get(measure, ()), strict=True)
    return [(x, value) for x, value in both if math.isfinite(value)]


def _axis(values: Sequence[Any]) -> tuple[list[tuple[float, str]], list[float | None]]:
    """Return the marks of an axis, and the height of each value; numbers are to scale, texts evenly apart."""
    bottom, top = _PARALLEL_PX - 24.0, TOP + 28.0
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if known and all(number is not None or value is None for number, value in zip(numbers, values, strict=True)):
        logarithmic = min(known) > 0 and max(known) / min(known) > 20
        scale = Scale(low=min(known), high=max(known), from_px=bottom, to_px=top, logarithmic=logarithmic)
        ends = dict.fromkeys((min(known), max(known)))
        marks = [(scale(end), svg.short_number(end)) for end in ends]
        return marks, [None if number is None else scale(number) for number in numbers]
    texts = list(dict.fromkeys(NOTHING if value is None else str(value) for value in values))
    step = (bottom - top) / max(1, len(texts) - 1)
    heights = {text: bottom - at * step for at, text in enumerate(texts)}
    marks = [(height, text[:_LABEL_CHARACTERS]) for text, height in heights.items()]
    return marks, [heights[NOTHING if value is None else str(value)] for value in values]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
