"""Curves of many steps: few points, and every peak."""

from __future__ import annotations

import math

from polyreme.console.step_curves import CURVE_POINTS, curve_of
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import StepTable

STEPS = 10_000


def record(step: int) -> StepRecord:
    peaks = {3_333: {"loss": 9.0}, 7_777: {"gradient_norm": 50.0}, 5_555: {"loss": math.nan}}
    held_out = {"held_out": {"": 2.0 if step != 600 else 1.0}} if step % 6 == 0 else {}
    plain = {"attempt": 1, "step": step, "loss": 1.0, "gradient_norm": 1.0, "tokens": 2, "step_s": 3.6}
    return StepRecord.model_validate({**plain, **held_out, **peaks.get(step, {})})


def test_no_peak_of_many_steps_is_lost() -> None:
    curve = curve_of(StepTable.of([record(step) for step in range(1, STEPS + 1)]))
    assert len(curve.step) <= 2 * CURVE_POINTS + 2
    assert (curve.step[0], curve.step[-1]) == (1.0, STEPS)
    assert (curve.tokens[-1], round(curve.hours[-1], 6)) == (2.0 * STEPS, STEPS / 1000)
    assert max(curve.values["loss"]) == 9.0
    assert max(curve.values["gradient norm"]) == 50.0
    at = curve.step.index(600.0)
    assert curve.values["held-out loss"][at] == 1.0
    assert set(map(len, curve.values.values())) == {len(curve.step)}


def test_a_run_without_steps_has_an_empty_curve() -> None:
    assert curve_of(StepTable.of([])).step == []
