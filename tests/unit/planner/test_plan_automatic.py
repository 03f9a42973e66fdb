"""Mode Auto: as good as the whole search, within its budgets, the same each time; messages for what does not fit."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, parse_job
from polyreme_api.job.workers import Workers
from polyreme_planner import automatic
from polyreme_planner.automatic import ESTIMATED_MAX, FINALISTS, LAYOUTS_MAX, WINNERS, nearest, quick_search
from polyreme_planner.costs import Recompute
from polyreme_planner.hardware import HARDWARE, MIXED
from polyreme_planner.layout import Layout, gives_each_packs
from polyreme_planner.loading import load_job
from polyreme_planner.memory import Memory
from polyreme_planner.plan import Plan, plan_for
from polyreme_planner.plan_inputs import hardware_of, setting_of
from polyreme_planner.refusals import memory_of_cut, out_of_memory
from polyreme_planner.schedules import V_SHAPED, Schedule
from polyreme_planner.search import Candidate, Estimate, Pricer
from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO
from tests.unit.api.jobs import job_with
from tests.unit.planner import plan_settings

BIG = {"spec.model.preset": "kimi-vl-a3b", "spec.data.sequenceTokens": 4096, "spec.training.packsPerStep": 64}


def big(replicas: int, devices: int = 8, **parallelism: Any) -> TrainingJobSpec:
    changes: dict[str, Any] = {"spec.workers": {"replicas": replicas, "devices": devices, "hardware": "h100-80g"}}
    if parallelism:
        changes["spec.parallelism"] = {"mode": "Explicit", **parallelism}
    return parse_job(job_with(BIG | changes)).spec


def naming(recompute: str, spec: TrainingJobSpec) -> TrainingJobSpec:
    """The same job with another choice of recomputation."""
    training = spec.training.model_copy(update={"recompute": recompute})
    return spec.model_copy(update={"training": training})


def memory_of_plan(spec: TrainingJobSpec, plan: Plan) -> Memory:
    assert plan.recompute is not None
    return memory_of_cut(
        setting_of(spec, plan.shape),
        plan.layout,
        plan.cut,
        packs_per_step=spec.training.packs_per_step,
        recompute=plan.recompute,
    )


def test_a_thousand_devices_are_searched_within_the_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"bound_s": 0, "estimated": 0, "simulated": 0}

    def counting(name: str) -> Any:
        do = getattr(Pricer, name)

        def counted(self: Pricer, *of: Any) -> Any:
            counts[name] += 1
            return do(self, *of)

        return counted

    for name in counts:
        monkeypatch.setattr(Pricer, name, counting(name))
    setting = plan_settings.setting_of(tokens=8192, numerics=MIXED)
    quick_search.cache_clear()
    found = quick_search(setting, world=1024, packs_per_step=8192)
    assert found.best is not None
    assert found.best.memory.total_bytes <= setting.hardware.usable_bytes
    assert 0 < counts["bound_s"] <= LAYOUTS_MAX
    assert 0 < counts["estimated"] <= 2 * ESTIMATED_MAX
    assert 0 < counts["simulated"] <= FINALISTS + WINNERS
    seen = dict(counts)
    assert quick_search(setting, world=1024, packs_per_step=8192) is found
    assert counts == seen, "the same search is not made twice"
    quick_search.cache_clear()
    assert quick_search(setting, world=1024, packs_per_step=8192) == found, "and comes out the same"


@pytest.mark.parametrize(("workers", "layout"), [(1, Layout()), (2, Layout(dp=2)), (4, Layout(dp=4))])
def test_a_small_job_on_processors_is_data_parallel_in_one_piece(workers: int, layout: Layout) -> None:
    plan = plan_for(load_job(job_with({"spec.workers.replicas": workers})).spec)
    assert (plan.layout, plan.cut.microbatches, plan.hardware) == (layout, 1, "cpu")


def test_ranks_that_do_not_divide_the_packs_must_be_worth_having() -> None:
    with pytest.raises(InvalidConfigError, match=r"pp3 1F1B.* would be no faster than 2 ranks; worker counts.*1, 2, 4"):
        plan_for(parse_job(job_with({"spec.workers.replicas": 3})).spec)
    plan = plan_for(big(3))
    assert plan.layout.world == 24
    assert plan.layout.pp % 3 == 0
    assert gives_each_packs(plan.packs_per_step, plan.layout.dp)


def test_a_model_that_does_not_fit_is_refused_with_its_consumers_and_enough_workers() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        plan_for(big(1, 2))
    words = refused.value.message
    for part in (
        "does not fit 2 x h100-80g",
        "the plan with the least memory, dp",
        "of 72.0 usable: optimizer",
        "activations",
    ):
        assert part in words
    assert refused.value.field == "spec.workers.replicas or spec.workers.hardware"
    workers = int(words.partition(" workers would fit: ")[0].rpartition(" ")[2])
    spec = big(workers, 2)
    plan = plan_for(spec)
    memory = memory_of_plan(spec, plan)
    assert memory.total_bytes <= HARDWARE["h100-80g"].usable_bytes


def test_recompute_is_suggested_where_it_makes_a_model_fit() -> None:
    with pytest.raises(InvalidConfigError, match=r"recompute: (Selective|Full) it would fit: dp") as refused:
        plan_for(naming("None", big(1, 4)))
    chosen = plan_for(big(1, 4))
    assert chosen.recompute is not None
    assert refused.value.field == f"spec.training.recompute: {chosen.recompute.title()} or spec.workers.replicas"
    assert f"it would fit: {chosen.layout}" in refused.value.message
    plan = plan_for(naming("Full", big(1, 4)))
    assert plan.cut.schedule not in V_SHAPED, "separate gradients would recompute every layer twice"
    # And the layout that was chosen is refused again where layers hold all that they make.
    asked = {axis: getattr(plan.layout, axis) for axis in ("dp", "ep", "pp", "cp", "tp")}
    plain = big(1, 4, **asked, microbatches=plan.cut.microbatches)
    assert plan_for(naming("Full", plain)).recompute is Recompute.FULL
    with pytest.raises(InvalidConfigError, match="no layout of 4 ranks fits") as refused:
        plan_for(naming("None", plain))
    assert "; with spec.training.recompute: Full it would fit, " in refused.value.message
    assert refused.value.field == "spec.training.recompute or spec.parallelism"


def test_an_explicit_layout_that_does_not_fit_names_the_nearest_that_does() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        plan_for(naming("None", big(4, dp=32, ep=32)))
    words = refused.value.message
    assert words.startswith("layout does not fit h100-80g: dp32 ep32 needs ")
    assert "usable: activations" in words, "the largest consumer comes first"
    near = nearest(setting_of(big(4), KIMI_VL_A3B), Layout(dp=32, ep=32), packs_per_step=64)
    assert near is not None
    of = near.candidate
    assert f"the nearest that fits: {of}, " in words
    asked = {axis: getattr(of.layout, axis) for axis in ("dp", "ep", "pp", "cp", "tp")}
    named = plan_for(big(4, **asked, microbatches=of.microbatches))
    assert named.layout == of.layout


def test_where_no_layout_of_these_ranks_fits_more_workers_are_asked_for() -> None:
    with pytest.raises(InvalidConfigError, match=r"no layout of 1 ranks fits; raise spec\.workers\.replicas"):
        plan_for(big(1, 1, dp=1))


def test_the_choice_of_a_pipeline_is_the_plans_cut() -> None:
    plan = plan_for(big(8))
    chosen = quick_search(setting_of(big(8), plan.shape), world=64, packs_per_step=64).best
    assert chosen is not None
    assert plan.layout.pp > 1
    assert plan.cut.schedule is not None
    assert (plan.layout, plan.cut.schedule, plan.cut.stage_layers, plan.cut.microbatches) == (
        chosen.candidate.layout,
        chosen.candidate.schedule,
        chosen.split,
        chosen.candidate.microbatches,
    )


def test_the_job_names_the_hardware_of_the_planner() -> None:
    named = typing.get_args(typing.get_args(Workers.model_fields["hardware"].annotation)[0])
    assert set(named) == {name for name, of in HARDWARE.items() if of.device_name or name == "cpu"}


@pytest.mark.parametrize(
    ("workers", "name", "memory_gib"),
    [
        ({}, "cpu", 4),
        ({"deviceResource": "nvidia.com/gpu"}, "h100-80g", 80),
        ({"deviceResource": "nvidia.com/gpu", "hardware": "h200-141g"}, "h200-141g", 141e9 / 2**30),
        ({"hardware": "h200-141g"}, "h200-141g", 141e9 / 2**30),
        ({"devices": 4, "limit": "64Gi"}, "cpu", 16),
        ({"limit": "8589934592"}, "cpu", 8),
        ({"deviceResource": "nvidia.com/gpu", "limit": "1Gi"}, "h100-80g", 80),
    ],
    ids=str,
)
def test_the_hardware_is_named_or_follows_from_the_resource(
    workers: dict[str, Any], name: str, memory_gib: float
) -> None:
    limit = workers.get("limit")
    given = {key: value for key, value in workers.items() if key != "limit"}
    if limit is not None:
        container = {"name": "worker", "resources": {"limits": {"memory": limit}}}
        given["template"] = {"spec": {"containers": [container]}}
    hardware = hardware_of(parse_job(job_with({"spec.workers": given})).spec)
    assert hardware.name == name
    assert hardware.memory_bytes / 2**30 == pytest.approx(memory_gib)


def test_plans_for_other_hardware_have_other_hashes() -> None:
    plans = [
        plan_for(parse_job(job_with({"spec.workers": {"hardware": name}})).spec) for name in ("h100-80g", "h200-141g")
    ]
    assert plans[0].layout == plans[1].layout
    assert plans[0].hash != plans[1].hash


def test_a_rank_whose_memory_is_full_hears_what_takes_it_and_what_needs_less() -> None:
    spec = big(4)
    setting = setting_of(spec, KIMI_VL_A3B)
    layout = Layout(dp=4, ep=8, tp=2, pp=4)
    cut = dataclasses.replace(plan_for(big(4, dp=4, ep=8, tp=2, pp=4)).cut, schedule=Schedule.ONE_F_ONE_B)
    words = out_of_memory(setting, layout, cut, packs_per_step=64, message="tried to allocate 2 GiB")
    assert words.startswith("rank ran out of memory: tried to allocate 2 GiB; the plan, dp4 ep8 pp4 tp2, counts ")
    assert "optimizer" in words
    held = memory_of_cut(setting, layout, cut, packs_per_step=64).total_bytes / 2**30
    less = float(words.rpartition(", ")[2].removesuffix(" GiB"))
    assert "a layout that needs less: " in words
    assert less <= 0.91 * held


def test_nothing_is_weighed_that_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Candidate] = []
    weigh = Pricer.estimated

    def estimated(self: Pricer, of: Candidate) -> Estimate:
        seen.append(of)
        return weigh(self, of)

    monkeypatch.setattr(Pricer, "estimated", estimated)
    quick_search.cache_clear()
    quick_search(plan_settings.setting_of(), world=8, packs_per_step=64, recomputes=(Recompute.FULL,))
    assert {of.recompute for of in seen} == {Recompute.FULL}
    assert {of.schedule for of in seen} >= {Schedule.ONE_F_ONE_B}
    assert not {of.schedule for of in seen} & V_SHAPED


def test_layouts_beyond_the_budget_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "LAYOUTS_MAX", 1)
    quick_search.cache_clear()
    found = quick_search(plan_settings.setting_of(shape=KIMI_VL_NANO, tokens=160), world=8, packs_per_step=64)
    quick_search.cache_clear()
    assert found.examined == 1
