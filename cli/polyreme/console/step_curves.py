"""Curves of a run's committed steps, thinned out; how many steps a page reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from polyreme.console.run_source import Curve
from polyreme.report.svg import thin
from polyreme.run_files.records import StepBytes
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import held_out_losses, table_of

CURVE_POINTS = 600
"""Points of one curve, and held-out losses beside them."""
CURVES_KEPT = 128
"""Runs whose curves are kept."""
STEPS_MAX = StepBytes(lines=64 * 2**20, columns=256 * 2**20)
"""Lines take 10 microseconds a record of 400 bytes; columns so large are of 2.5 million steps."""


def curve_of(history: Sequence[StepRecord]) -> Curve:
    """Return the curves of the steps that count; of many, no peak of a loss or a gradient norm is lost."""
    table, last = table_of(history), len(history) - 1
    held_out, steps = dict(held_out_losses(table)), table.column("step")
    tokens = list(itertools.accumulate(table.column("tokens")))
    seconds = list(itertools.accumulate(table.column("step_s")))
    measured = [(at, held_out[steps[at]]) for at in sorted(table.sparse("held_out")) if steps[at] in held_out]
    kept = {0, last} if history else set[int]()
    kept.update(_peaks(enumerate(table.column("loss")), CURVE_POINTS // 2))
    kept.update(_peaks(enumerate(table.column("gradient_norm")), CURVE_POINTS // 2))
    kept.update(_peaks(measured, CURVE_POINTS))
    places = sorted(kept)
    chosen = table.take(places)
    return Curve(
        step=[float(step) for step in chosen.column("step")],
        tokens=[float(tokens[at]) for at in places],
        hours=[seconds[at] / 3600 for at in places],
        values={
            "loss": chosen.column("loss"),
            "learning rate": chosen.column("learning_rate"),
            "gradient norm": chosen.column("gradient_norm"),
            "held-out loss": [held_out.get(step, float("nan")) for step in chosen.column("step")],
        },
    )


def _peaks(values: Iterable[tuple[int, float]], most: int) -> Iterator[int]:
    points = [(float(at), value) for at, value in values if math.isfinite(value)]
    return (int(at) for at, _ in thin(points, most))
