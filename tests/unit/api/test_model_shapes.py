"""Model shapes: the published counts, overrides, and plans by hand."""

from __future__ import annotations

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import load_job
from polyreme_api.plan.layout import Layout, fitting_worlds
from polyreme_api.plan.parts import Part, expert_parameters, parameter_count, part_parameters
from polyreme_api.plan.plan import Plan, plan_for, shape_digest
from polyreme_api.plan.shapes import KIMI_VL_A3B, KIMI_VL_NANO, model_shape
from polyreme_api.plan.volume import state_bytes_per_rank
from tests.unit.api.jobs import job_with


def test_kimi_vl_a3b_has_the_published_parameter_count() -> None:
    assert parameter_count(KIMI_VL_A3B) == 16_407_654_384


def test_moonlight_is_planned_as_a_decoder_alone() -> None:
    workers = {"replicas": 1, "devices": 4, "hardware": "h200-141g"}
    changes = {"spec.model.preset": "moonlight-16b-a3b", "spec.workers": workers, "spec.training.packsPerStep": 4}
    plan = plan_for(load_job(job_with(changes)).spec)
    assert not plan.shape.sees
    assert parameter_count(plan.shape) == 15_960_108_544
    assert part_parameters(plan.shape)[Part.TOWER].total == 0
    assert Plan.from_json(plan.to_json()) == plan


def test_overrides_change_only_what_they_name() -> None:
    shape = model_shape("kimi-vl-nano", {"decoder": {"layers": 5}})
    assert shape.decoder.layers == 5
    assert shape.vision == KIMI_VL_NANO.vision
    assert shape_digest(shape) != shape_digest(KIMI_VL_NANO)


@pytest.mark.parametrize("part", ["vision", "decoder"])
def test_a_size_of_nothing_is_refused_before_anything_divides_by_it(part: str) -> None:
    for name in ("heads", "width", "layers"):
        with pytest.raises(InvalidConfigError, match=rf"{part}\.{name} is 0, rule at least 1"):
            model_shape("kimi-vl-nano", {part: {name: 0}})


def test_a_model_without_dense_layers_or_shared_experts_is_one() -> None:
    assert model_shape("kimi-vl-nano", {"decoder": {"dense_layers": 0, "shared_experts": 0}}).decoder.dense_layers == 0


def test_a_model_that_does_not_fit_a_device_spreads_its_experts() -> None:
    workers = {"replicas": 4, "devices": 8, "hardware": "h100-80g"}
    job = load_job(
        job_with({"spec.model.preset": "kimi-vl-a3b", "spec.workers": workers, "spec.training.packsPerStep": 64})
    )
    plan = plan_for(job.spec)
    assert plan.layout.ep > 1
    one = state_bytes_per_rank(Layout(dp=4, ep=1), shape=KIMI_VL_A3B)
    assert (
        one - state_bytes_per_rank(Layout(dp=4, ep=4), shape=KIMI_VL_A3B)
        == 16 * expert_parameters(KIMI_VL_A3B) * 3 // 4
    )


def test_a_resize_of_an_explicit_layout_scales_dp_alone() -> None:
    changes = {"spec.parallelism": {"mode": "Explicit", "dp": 4, "ep": 2}, "spec.workers": {"replicas": 4}}
    spec = load_job(job_with(changes)).spec
    assert plan_for(spec).layout == Layout(dp=4, ep=2)
    assert plan_for(spec, replicas=2).layout == Layout(dp=2, ep=2)
    with pytest.raises(InvalidConfigError, match="ep 2 does not divide"):
        plan_for(spec, replicas=1)


def test_worker_counts_that_fit_are_found_for_a_million_packs_and_the_largest_gang() -> None:
    worlds = fitting_worlds(near=7_777, step=1, shape=KIMI_VL_NANO, packs_per_step=1_000_000)
    assert worlds == [8000, 6250, 10_000, 5000, 4000]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"shape": 3}', '{"shape": {"name": "x"}}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="plan is damaged"):
        Plan.from_json(text)
