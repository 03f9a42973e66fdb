"""Time to draw a step's answers: the serving planner's price of the same work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polyreme_api.job.objective import Objective
from polyreme_planner.drawing import ROWS_MAX, draw_s, draws_s
from polyreme_planner.flops import Mix
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import expert_parameters, parameter_count
from polyreme_planner.plan import plan_for
from polyreme_planner.plan_inputs import setting_of
from polyreme_planner.serving import plan_serving
from polyreme_planner.serving_prices import Phases, ServingSetting, indicator_without_data
from polyreme_planner.shapes import KIMI_VL_A3B
from tests.unit.planner.plan_settings import setting_of as searched
from tests.unit.planner.test_generation_layout import spec_of

MIX = Mix(sequence_tokens=1024)
SETTING = searched(shape=KIMI_VL_A3B, tokens=8192, hardware="h200-141g")


def objective(samples: int = 2, **more: Any) -> Objective:
    return Objective.model_validate({"kind": "GroupRelative", "reward": "a:b", "samples": samples, **more})


def test_one_device_draws_as_the_serving_planner_prices_it() -> None:
    """Each prompt is read once, and all of its answers are decoded together."""
    phases = Phases(mix=MIX, answer_tokens=100, batch=8)
    served = ServingSetting(
        shape=KIMI_VL_A3B,
        devices=(SETTING.hardware,),
        phases=phases,
        indicator=indicator_without_data(KIMI_VL_A3B),
        budget=0.0,
    )
    read = plan_serving(served)
    decoded = plan_serving(dataclasses.replace(served, phases=dataclasses.replace(phases, batch=16)))
    assert (read.sequences[0], decoded.sequences[1]) == (8, 16)
    expected = read.seconds[0] + decoded.seconds[1]
    assert draw_s(SETTING, Layout(), objective(samples=2), phases) == pytest.approx(expected)


def test_more_answers_than_rows_are_drawn_in_waves() -> None:
    phases = Phases(mix=MIX, answer_tokens=100, batch=ROWS_MAX // 8)
    wave_s = draw_s(SETTING, Layout(), objective(samples=8), phases)
    twice = dataclasses.replace(phases, batch=2 * ROWS_MAX // 8)
    assert draw_s(SETTING, Layout(), objective(samples=8), twice) == pytest.approx(2 * wave_s)
    assert draw_s(SETTING, Layout(dp=2), objective(samples=8), twice) == pytest.approx(wave_s)


def test_a_layout_of_draws_has_a_price_of_its_own_with_the_weights_that_are_sent() -> None:
    phases, trained = Phases(mix=MIX, answer_tokens=100, batch=64), Layout(dp=2, pp=4)
    own = objective(samples=8, generation={"parallelism": {"ep": 8}})
    setting = dataclasses.replace(SETTING, generation_ep=8)
    seconds = draw_s(setting, trained, own, phases)
    plain = draw_s(SETTING, Layout(dp=8, ep=8), objective(samples=8), phases)
    experts = expert_parameters(KIMI_VL_A3B)
    sent = (parameter_count(KIMI_VL_A3B) - experts * 7 / 8) * setting.numerics.weight_bytes
    assert seconds == pytest.approx(plain + sent / setting.hardware.far_bytes_per_s)
    assert seconds < draw_s(SETTING, trained, objective(samples=8), phases)


def test_only_stages_with_rewards_draw() -> None:
    spec = spec_of(None)
    plan = plan_for(spec)
    found = draws_s(spec, setting_of(spec, plan.shape), plan.layout, prompt_tokens=1024)
    assert list(found) == ["s0"]
    assert found["s0"] > 0
