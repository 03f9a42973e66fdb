"""Measures of the objectives of a run's stages, a small picture each, whatever they are called."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyreme.report import svg
from polyreme.report.svg import Point, Scale, safe, short_number
from polyreme.views.formatting import in_words
from polyreme_api.progress import ALL_SETS, StepRecord
from polyreme_api.step_columns import table_of

HELD_OUT_PAIRS = "heldOutPairAccuracy"
_WORDS = {HELD_OUT_PAIRS: "held-out pair accuracy"}
MEASURES_MAX = 32
_WIDTH_PX, _HEIGHT_PX, _EDGE_PX = 240, 36, 3


def rows(records: Sequence[StepRecord]) -> list[tuple[str, str, str, str]]:
    """Return name, first and last value, and picture of each measure, as cells of HTML."""
    found = _measures(records)
    return [
        (
            safe(_WORDS.get(name, in_words(name))),
            short_number(points[0][1]),
            short_number(points[-1][1]),
            _picture(name, points),
        )
        for name, points in list(found.items())[:MEASURES_MAX]
    ]


def _measures(records: Sequence[StepRecord]) -> dict[str, list[Point]]:
    """Return steps and values by name, in the order in which names appear."""
    found: dict[str, list[Point]] = {}
    table = table_of(records)
    steps, objective, pairs = table.column("step"), table.sparse("objective"), table.sparse("held_out_pairs")
    for place in sorted({*objective, *pairs}):
        values = dict(objective.get(place, {}))
        if ALL_SETS in pairs.get(place, ()):
            values[HELD_OUT_PAIRS] = pairs[place][ALL_SETS]
        for name, value in values.items():
            if math.isfinite(value):
                found.setdefault(name, []).append((float(steps[place]), value))
    return found


def _picture(name: str, points: list[Point]) -> str:
    steps, values = [step for step, _ in points], [value for _, value in points]
    x = Scale(low=min(steps), high=max(steps), from_px=_EDGE_PX, to_px=_WIDTH_PX - _EDGE_PX)
    y = Scale(low=min(values), high=max(values), from_px=_HEIGHT_PX - _EDGE_PX, to_px=_EDGE_PX)
    line = svg.line(svg.thin([(x(step), y(value)) for step, value in points]), "trend c0")
    says = f"{in_words(name)} from step {int(steps[0])} to {int(steps[-1])}"
    return (
        f'<svg viewBox="0 0 {_WIDTH_PX} {_HEIGHT_PX}" width="{_WIDTH_PX}" height="{_HEIGHT_PX}" role="img" '
        f'aria-label="{safe(says)}">{line}</svg>'
    )
