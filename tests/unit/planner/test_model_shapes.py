"""Model shapes: the published counts, overrides, and plans by hand."""

from __future__ import annotations

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.layout import Layout, fitting_worlds
from polyreme_planner.loading import load_job
from polyreme_planner.model_parts import Part, parameter_count, part_parameters
from polyreme_planner.plan import Plan, plan_for, shape_digest
from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO, model_shape
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
        with pytest.raises(InvalidConfigError, match=rf"{part}\.{name} is 0, expected at least 1"):
            model_shape("kimi-vl-nano", {part: {name: 0}})


def test_a_model_without_dense_layers_or_shared_experts_is_one() -> None:
    assert model_shape("kimi-vl-nano", {"decoder": {"dense_layers": 0, "shared_experts": 0}}).decoder.dense_layers == 0


def test_decimals_are_text_and_counts_are_whole_numbers() -> None:
    sizes: dict[str, int | str] = {"routed_scaling": "2.5", "norm_eps": "1e-6", "rope_theta": 50_000, "layers": "4"}
    overrides = {"spec.model.overrides": {"decoder": sizes}}
    decoder = plan_for(load_job(job_with(overrides)).spec).shape.decoder
    assert (decoder.routed_scaling, decoder.norm_eps, decoder.rope_theta, decoder.layers) == (2.5, 1e-6, 50_000, 4)
    with pytest.raises(
        InvalidConfigError, match=r"decoder\.layers is '2\.5', expected a whole number; change spec\.model"
    ):
        model_shape("kimi-vl-nano", {"decoder": {"layers": "2.5"}})


IMPOSSIBLE: dict[str, tuple[dict[str, int | str], str]] = {
    "an odd part without rotation": ({"nope_dim": 15}, "nope_dim: 15 is odd"),
    "an odd latent": ({"kv_rank": 31}, "kv_rank: 31 is odd"),
    "values wider than queries": ({"value_dim": 25}, r"value_dim: 25 is above the width of a query, .* \(24\)"),
    "rows of experts out of line": (
        {"expert_ffn_width": 66},
        r"expert_ffn_width: 66 is not a multiple of 4 \(16 bytes",
    ),
    "rows of the stream out of line": ({"width": 98}, r"width: 98 is not a multiple of 4 \(16 bytes"),
    "groups that do not divide": ({"expert_groups": 3}, "expert_groups: 3 does not divide experts"),
    "groups of one": ({"expert_groups": 8}, "expert_groups: 8 leaves groups of 1 expert"),
    "more groups than there are": ({"groups_per_token": 2}, r"groups_per_token: 2 lies outside 1\.\.expert_groups"),
    "groups too small": (
        {"expert_groups": 4, "experts_per_token": 3},
        r"experts_per_token: 3 are more than groups_per_token \(1\) groups of 2 experts have",
    ),
    "positions that shrink": ({"yarn_factor": "0.5"}, "yarn_factor: 0.5 is below 1"),
    "a ramp that falls": ({"yarn_factor": 2, "yarn_beta_fast": "0.5"}, "yarn_beta_fast: 0.5 is below yarn_beta_slow"),
    "no epsilon": ({"norm_eps": "0"}, "norm_eps is 0.0, expected above 0"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_sizes_that_no_step_could_compute_are_refused_before_it(case: str) -> None:
    sizes, words = IMPOSSIBLE[case]
    with pytest.raises(InvalidConfigError, match=words):
        model_shape("kimi-vl-nano", {"decoder": sizes})


def test_rows_of_experts_are_counted_in_bytes_of_the_type_that_is_computed_in() -> None:
    changes = {"spec.model.overrides": {"decoder": {"expert_ffn_width": 68}}}
    assert plan_for(load_job(job_with(changes)).spec).shape.decoder.expert_ffn_width == 68
    with pytest.raises(InvalidConfigError, match=r"expert_ffn_width: 68 is not a multiple of 8 \(16 bytes"):
        plan_for(load_job(job_with(changes | {"spec.training.precision": "bfloat16"})).spec)


@pytest.mark.parametrize(
    ("part", "sizes", "words"),
    [
        ("decoder", {"nope_dim": 12}, r"decoder.nope_dim: head width 20 \(nope_dim \+ rope_dim\)"),
        ("decoder", {"nope_dim": 256}, "head width 264"),
        ("vision", {"width": 48}, r"vision.heads: head width 12 \(width / heads\)"),
    ],
)
def test_widths_of_heads_that_flash_kernels_refuse_are_refused_where_these_run(
    part: str, sizes: dict[str, int], words: str
) -> None:
    changes = {"spec.model.overrides": {part: sizes}, "spec.training.precision": "bfloat16"}
    plan_for(load_job(job_with(changes)).spec)
    on_devices = changes | {"spec.workers.hardware": "h100-80g"}
    with pytest.raises(InvalidConfigError, match=words):
        plan_for(load_job(job_with(on_devices)).spec)
    plan_for(load_job(job_with(on_devices | {"spec.training.precision": "float32"})).spec)


def test_shapes_that_earlier_versions_knew_keep_their_digests() -> None:
    """A checkpoint is known by it."""
    assert shape_digest(KIMI_VL_NANO) == "6b50a49315764025"
    assert shape_digest(KIMI_VL_A3B) == "6a3cf9acc3dc4a70"
    assert shape_digest(model_shape("kimi-vl-nano", {"decoder": {"yarn_factor": 2}})) != shape_digest(KIMI_VL_NANO)


def test_a_model_that_does_not_fit_a_device_spreads_its_experts() -> None:
    workers = {"replicas": 4, "devices": 8, "hardware": "h100-80g"}
    job = load_job(
        job_with({"spec.model.preset": "kimi-vl-a3b", "spec.workers": workers, "spec.training.packsPerStep": 64})
    )
    plan = plan_for(job.spec)
    assert plan.layout.ep > 1


def test_a_resize_of_an_explicit_layout_scales_dp_alone() -> None:
    changes = {"spec.parallelism": {"mode": "Explicit", "dp": 4, "ep": 2}, "spec.workers": {"replicas": 4}}
    spec = load_job(job_with(changes)).spec
    assert plan_for(spec).layout == Layout(dp=4, ep=2)
    assert plan_for(spec, replicas=2).layout == Layout(dp=2, ep=2)
    with pytest.raises(InvalidConfigError, match="ep 2 does not divide"):
        plan_for(spec, replicas=1)


def test_worker_counts_that_fit_are_found_for_a_million_packs_and_the_largest_gang() -> None:
    worlds = fitting_worlds(near=7_777, step=1, shape=KIMI_VL_NANO, packs_per_step=1_000_000)
    assert worlds == [7752, 7813, 7693, 7875, 7634]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"shape": 3}', '{"shape": {"name": "x"}}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="plan is damaged"):
        Plan.from_json(text)
