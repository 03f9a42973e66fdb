"""Curves of a run's committed steps, thinned out; how many steps a page reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from polyreme.console.run_source import Curve
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
    """Return the curves of the steps that count."""
    table, last = table_of(history), len(history) - 1
    held_out = dict(held_out_losses(table))
    tokens = list(itertools.accumulate(table.column("tokens")))
    seconds = list(itertools.accumulate(table.column("step_s")))
    kept = sorted({*_thin(range(len(history))), *_thin(sorted(table.sparse("held_out"))), *([last] if history else [])})
    chosen = table.take(kept)
    return Curve(
        step=[float(step) for step in chosen.column("step")],
        tokens=[float(tokens[at]) for at in kept],
        hours=[seconds[at] / 3600 for at in kept],
        values={
            "loss": chosen.column("loss"),
            "learning rate": chosen.column("learning_rate"),
            "gradient norm": chosen.column("gradient_norm"),
            "held-out loss": [held_out.get(step, float("nan")) for step in chosen.column("step")],
        },
    )


def _thin(places: Sequence[int]) -> Sequence[int]:
    return places[:: max(1, -(-len(places) // CURVE_POINTS))]
