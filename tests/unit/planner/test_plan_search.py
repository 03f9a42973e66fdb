"""The search of a plan: all results fit, none is worse than a candidate that it skipped, and refusals say why."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.automatic import quick_search
from polyreme_planner.costs import Measured, PartTimes, Recompute, Setting, part_times
from polyreme_planner.flops import Mix, forward_flops
from polyreme_planner.hardware import FLOAT32, HARDWARE, MIXED, hardware_named
from polyreme_planner.layout import Layout, misfits
from polyreme_planner.loading import load_job
from polyreme_planner.memory import Memory, least_states, memory_of
from polyreme_planner.model_parts import Part, all_parts, parameter_count
from polyreme_planner.pipeline_simulation import StageTimes, program
from polyreme_planner.plan_inputs import numerics_of
from polyreme_planner.refusals import what_does_not_fit
from polyreme_planner.schedule_picture import picture
from polyreme_planner.schedules import V_SHAPED, Schedule
from polyreme_planner.search import (
    Candidate,
    Estimate,
    Pricer,
    candidates,
    is_supported,
    layouts,
    simulate,
    simulated_microbatches,
)
from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO, MOONLIGHT_16B_A3B, ModelShape
from polyreme_planner.stage_split import balanced_split
from tests.unit.api.jobs import job_with
from tests.unit.planner.plan_settings import setting_of


def memory(setting: Setting, of: Candidate, split: tuple[int, ...]) -> Memory:
    return memory_of(
        setting,
        of.layout,
        packs=of.microbatch_packs,
        microbatches=simulated_microbatches(of),
        recompute=of.recompute,
        schedule=of.schedule,
        split=split,
    )


@pytest.mark.slow
@given(
    world=st.sampled_from([4, 8, 16, 24]),
    memory_gib=st.integers(8, 200),
    packs=st.sampled_from([32, 64, 96]),
    recomputed=st.booleans(),
)
@settings(max_examples=8)
def test_a_plan_that_does_not_fit_is_never_returned(world: int, memory_gib: int, packs: int, recomputed: bool) -> None:
    base = setting_of(numerics=MIXED)
    setting = dataclasses.replace(base, hardware=dataclasses.replace(base.hardware, memory_bytes=memory_gib * 2**30))
    choices = tuple(Recompute) if recomputed else (Recompute.NONE,)
    found = quick_search(setting, world=world, packs_per_step=packs, recomputes=choices, runners_up=5)
    for estimate in [found.best, *(other for other, _ in found.runners_up)]:
        if estimate is None:
            continue
        of = estimate.candidate
        assert memory(setting, of, estimate.split) == estimate.memory
        assert estimate.memory.total_bytes <= setting.hardware.usable_bytes
        assert sum(estimate.split) == 27
        assert of.layout.world == world
        assert of.layout.dp * of.microbatches * of.microbatch_packs == packs
        assert of.recompute in choices
        assert of.recompute is not Recompute.FULL or of.schedule not in V_SHAPED
        assert not misfits(of.layout, world=world, shape=setting.shape, packs_per_step=packs)


@pytest.mark.slow
def test_no_candidate_of_a_small_world_is_faster_than_the_choice() -> None:
    """Every candidate, simulated with the split that the search would begin with, against the one that it chose."""
    setting = setting_of(shape=KIMI_VL_NANO, tokens=160, hardware="cpu")
    found = quick_search(setting, world=4, packs_per_step=16, recomputes=tuple(Recompute))
    assert found.best is not None
    for of in candidates(setting, world=4, packs_per_step=16):
        if not is_supported(of):
            continue
        times = part_times(setting, of.layout, packs=of.microbatch_packs, recompute=of.recompute)
        model = times.model_times(setting.shape)
        if of.schedule is None:
            took_s = of.microbatches * model.of_stages((len(model.layers),))[0].total_s
        else:
            split = balanced_split(model, schedule=of.schedule, ranks=of.layout.pp)
            order = program(of.schedule, ranks=of.layout.pp, microbatches=of.microbatches)
            took_s = order.makespan_s(model.of_stages(split))
        # Without what comes once a step, and without transfers: a bound from below would be fair to all.
        assert found.best.step_s <= took_s + found.best.shares_s["gradients"] + 0.02, str(of)


@pytest.mark.slow
def test_runners_up_are_slower_and_say_why() -> None:
    found = quick_search(setting_of(), world=32, packs_per_step=64, runners_up=5)
    assert found.best is not None
    assert found.runners_up
    for other, why in found.runners_up:
        assert other.step_s >= found.best.step_s
        assert f"{other.step_s / found.best.step_s - 1:.1%} slower" in why
        assert (other.candidate.layout, other.candidate.schedule) != (
            found.best.candidate.layout,
            found.best.candidate.schedule,
        )


@pytest.mark.slow
def test_a_model_that_fits_nowhere_is_refused_with_its_consumers_and_a_plan_that_fits() -> None:
    setting = setting_of()
    found = quick_search(setting, world=2, packs_per_step=256)
    assert found.best is None
    error = what_does_not_fit(
        setting,
        found.leanest,
        replicas=1,
        devices=2,
        packs_per_step=256,
        found=lambda world: quick_search(setting, world=world, packs_per_step=256).best,
    )
    assert isinstance(error, InvalidConfigError)
    assert error.field == "spec.workers.replicas or spec.workers.hardware"
    for words in (
        "does not fit 2 x h100-80g",
        "optimizer",
        "weights",
        "GiB per device of 72.0 usable",
        "workers would fit",
    ):
        assert words in error.message
    larger = int(error.message.partition(" workers would fit")[0].rpartition(" ")[2])
    assert quick_search(setting, world=2 * larger, packs_per_step=256).best is not None


def test_a_world_that_does_not_divide_the_packs_is_refused() -> None:
    setting = setting_of(shape=KIMI_VL_NANO, tokens=161)
    found = quick_search(setting, world=7, packs_per_step=5)
    assert found.best is None
    error = what_does_not_fit(
        setting, found.leanest, replicas=7, devices=1, packs_per_step=5, found=lambda _: found.best
    )
    assert "no plan for 7 ranks" in error.message


def test_state_is_sixteen_bytes_a_parameter_on_one_rank() -> None:
    setting = setting_of(numerics=FLOAT32)
    assert least_states(setting)(Layout()) == pytest.approx(16 * parameter_count(KIMI_VL_A3B))
    one = Candidate(layout=Layout(), schedule=None, recompute=Recompute.NONE, microbatch_packs=1, microbatches=1)
    of = memory(setting, one, (27,))
    assert of.weights_bytes + of.gradients_bytes + of.optimizer_bytes == pytest.approx(
        16 * parameter_count(KIMI_VL_A3B)
    )


@pytest.mark.parametrize("layout", [Layout(dp=8, ep=8), Layout(tp=8), Layout(dp=8), Layout(dp=2, pp=4, tp=2)])
def test_what_is_divided_is_held_in_parts(layout: Layout) -> None:
    routed = 16 * 26 * 64 * 3 * 2048 * 1408
    common = 16 * parameter_count(KIMI_VL_A3B) - routed
    expected = (common / layout.tp + routed / layout.ep) / layout.pp
    assert least_states(setting_of())(layout) == pytest.approx(expected)


def test_moments_are_sharded_over_the_replicas() -> None:
    layout = Layout(dp=8, ep=2)
    plain = least_states(setting_of(numerics=dataclasses.replace(MIXED, sharded_optimizer=False)))(layout)
    sharded = least_states(setting_of(numerics=MIXED))(layout)
    routed = 26 * 64 * 3 * 2048 * 1408
    common = parameter_count(KIMI_VL_A3B) - routed
    shares = 4 * (common / 8 + routed / 2 / 4)
    assert plain - sharded == pytest.approx(12 * (common * 7 / 8 + routed / 2 * 3 / 4) - shares)


def test_rows_are_held_in_float32_with_two_moments_and_a_gradient() -> None:
    layout, numerics = Layout(dp=8, ep=2), dataclasses.replace(MIXED, sharded_parameters=True)
    routed = 26 * 64 * 3 * 2048 * 1408
    common = parameter_count(KIMI_VL_A3B) - routed
    assert least_states(setting_of(numerics=numerics))(layout) == pytest.approx(16 * (common / 8 + routed / 2 / 4))
    alone = least_states(setting_of(numerics=numerics))(Layout(tp=4, ep=4))
    assert alone == pytest.approx(18 * (common / 4 + routed / 4)), "nobody to share with"


@pytest.mark.parametrize(("rows", "size_bytes"), [(False, 2), (True, 4)])
def test_a_reference_in_memory_is_a_second_copy_of_the_trained_weights(rows: bool, size_bytes: int) -> None:
    """Of rows, in float32 as they are held."""
    layout = Layout(dp=8, ep=8) if not rows else Layout(dp=8)
    numerics = dataclasses.replace(MIXED, sharded_parameters=rows)
    once, twice = (
        least_states(setting_of(numerics=dataclasses.replace(numerics, weight_copies=copies)))(layout)
        for copies in (1, 2)
    )
    routed = 26 * 64 * 3 * 2048 * 1408
    common = parameter_count(KIMI_VL_A3B) - routed
    held = (common + routed) / 8 if rows else common + routed / 8
    assert twice - once == pytest.approx(size_bytes * held)
    for scores, copies in (("Cached", 1), ("Online", 2)):
        stage = {"name": "a", "steps": 4, "objective": {"kind": "Preference", "reference": {"scores": scores}}}
        spec = load_job(job_with({"spec.training.steps": 4, "spec.training.stages": [stage]})).spec
        assert numerics_of(spec, KIMI_VL_A3B).weight_copies == copies


def test_rows_do_not_go_with_stages() -> None:
    rows = setting_of(numerics=dataclasses.replace(MIXED, sharded_parameters=True))
    assert any(layout.pp > 1 for layout in layouts(setting_of(), world=8, packs_per_step=8))
    assert {layout.pp for layout in layouts(rows, world=8, packs_per_step=8)} == {1}


@pytest.mark.parametrize("shape", [KIMI_VL_A3B, MOONLIGHT_16B_A3B], ids=lambda shape: shape.name)
@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputation_takes_time_and_gives_memory(recompute: Recompute, shape: ModelShape) -> None:
    setting, layout = setting_of(shape=shape), Layout(dp=8, ep=8)
    plain = part_times(setting, layout, packs=1, recompute=Recompute.NONE).times[Part.MOE]
    again = part_times(setting, layout, packs=1, recompute=recompute).times[Part.MOE]
    assert again.input_s > plain.input_s
    assert (again.forward_s, again.weight_s) == (plain.forward_s, plain.weight_s)
    base = Candidate(layout=layout, schedule=None, recompute=Recompute.NONE, microbatch_packs=1, microbatches=1)
    less = dataclasses.replace(base, recompute=recompute)
    assert memory(setting, less, (27,)).activations_bytes < memory(setting, base, (27,)).activations_bytes


@pytest.mark.parametrize("schedule", list(Schedule))
def test_ranks_never_wait_less_than_not_at_all(schedule: Schedule) -> None:
    """Many microbatches are extrapolated from few that are simulated; the fullest rank's work bounds what comes out."""
    layout = Layout(ep=8, pp=2, cp=2, tp=8, ulysses=2)
    of = Candidate(layout=layout, schedule=schedule, recompute=Recompute.NONE, microbatch_packs=1, microbatches=256)
    setting = setting_of(tokens=8192, hardware="h200-141g")
    simulated = Pricer(setting).simulated(of, 1)
    assert simulated.bubble >= 0
    assert simulated.shares_s["bubble"] >= 0


def test_products_take_their_operations_over_the_rate() -> None:
    setting = setting_of()
    times: PartTimes = part_times(setting, Layout(cp=2, tp=2), packs=2, recompute=Recompute.NONE)
    flops = forward_flops(KIMI_VL_A3B, setting.mix)
    tokens = 2 * 4096 / 4
    assert times.times[Part.HEAD].weight_s == pytest.approx(flops[Part.HEAD] * tokens / setting.hardware.flops_per_s)
    assert set(times.exchanged_s[Part.MOE]) == {"cp", "tp"}
    assert not times.exchanged_s[Part.TOWER]


def measured(hardware: str, mix: Mix) -> Measured:
    of = StageTimes(forward_s=1e-6, input_s=2e-6, weight_s=3e-6)
    return Measured(hardware=hardware, mix=mix, seconds_per_token=dict.fromkeys(Part, of))


def test_measured_times_replace_products_and_only_their_own() -> None:
    setting = setting_of(shape=KIMI_VL_NANO, tokens=100, hardware="cpu")
    with_times = dataclasses.replace(setting, measured=measured("cpu", setting.mix))
    times = part_times(with_times, Layout(), packs=3, recompute=Recompute.NONE)
    assert times.times[Part.DENSE].weight_s == pytest.approx(3e-6 * 300)
    with pytest.raises(InvalidConfigError, match="of other hardware: cpu, the plan is for h100-80g"):
        dataclasses.replace(with_times, hardware=HARDWARE["h100-80g"])
    with pytest.raises(InvalidConfigError, match="of another mix"):
        dataclasses.replace(with_times, mix=Mix(sequence_tokens=200))


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match=r"unknown hardware: 'tpu', known are a100-80g, .*--hardware"):
        hardware_named("tpu")


def pipelined() -> Estimate:
    of = Candidate(
        layout=Layout(dp=2, pp=4),
        schedule=Schedule.DUAL_PIPE_V,
        recompute=Recompute.NONE,
        microbatch_packs=1,
        microbatches=16,
    )
    return Pricer(setting_of()).simulated(of, 20)


@pytest.mark.slow
def test_the_picture_shows_every_rank_and_its_waiting() -> None:
    best = pipelined()
    simulated = simulate(setting_of(), best)
    assert simulated is not None
    rows = picture(simulated, width=200)
    assert len(rows) == best.candidate.layout.pp
    cells = [row.partition("  ")[2] for row in rows]
    assert {len(row) for row in cells} == {200}
    waiting = sum(row.count(".") for row in cells) / (200 * len(cells))
    assert waiting == pytest.approx(simulated.bubble, abs=0.02)
    assert set("".join(cells)) <= set("FBIWfbiw.")


def test_every_part_has_a_time() -> None:
    times = part_times(setting_of(), Layout(), packs=1, recompute=Recompute.NONE).times
    assert set(all_parts(KIMI_VL_A3B)) <= set(times)
