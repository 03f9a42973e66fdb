"""Recomputation that a job leaves to the planner: the least that fits, the fastest plan, a field of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, parse_job
from polyreme_planner.automatic import quick_search
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.hardware import FLOAT32, MIXED
from polyreme_planner.plan import Plan, plan_for
from polyreme_planner.plan_inputs import recomputes_of, setting_of
from polyreme_planner.refusals import memory_of_cut
from polyreme_planner.schedules import V_SHAPED, Schedule
from polyreme_planner.shapes import KIMI_VL_NANO
from tests.unit.api.jobs import job_with
from tests.unit.planner import plan_settings

MIB = 2**20
TOKENS = 512
PACKS = 32


def nano(
    memory_bytes: int = 4 * 2**30, *, recompute: str = "Auto", replicas: int = 2, **parallelism: Any
) -> TrainingJobSpec:
    """A small job on processors whose ranks have so much memory."""
    container = {"name": "worker", "resources": {"limits": {"memory": str(memory_bytes)}}}
    changes = {
        "spec.data.sequenceTokens": TOKENS,
        "spec.training": {"steps": 2, "packsPerStep": PACKS, "recompute": recompute},
        "spec.workers": {"replicas": replicas, "template": {"spec": {"containers": [container]}}},
        "spec.parallelism": {"mode": "Explicit", **parallelism} if parallelism else {"mode": "Auto"},
    }
    return parse_job(job_with(changes)).spec


def needed(spec: TrainingJobSpec) -> dict[Recompute, int]:
    """Memory that makes a plan of an explicit layout fit, by what its layers recompute."""
    plan = plan_for(spec)
    setting = setting_of(spec, plan.shape)
    return {
        recompute: int(
            memory_of_cut(setting, plan.layout, plan.cut, packs_per_step=PACKS, recompute=recompute).total_bytes
            / setting.hardware.usable_share
        )
        + MIB
        for recompute in Recompute
    }


def test_an_explicit_layout_recomputes_the_least_that_fits() -> None:
    needs = needed(nano(dp=2, ep=2))
    assert sorted(needs.values(), reverse=True) == list(needs.values()), "each holds less than the one before"
    for recompute, memory_bytes in needs.items():
        assert plan_for(nano(memory_bytes, dp=2, ep=2)).recompute is recompute
    with pytest.raises(InvalidConfigError, match=r"dp2 ep2, recompute full, needs .*: activations") as refused:
        plan_for(nano(needs[Recompute.FULL] - 2 * MIB, dp=2, ep=2))
    assert "with spec.training.recompute" not in refused.value.message, "it was tried"
    assert refused.value.field == "spec.parallelism"


def test_a_job_that_names_it_gets_what_it_names_or_hears_what_would_fit() -> None:
    needs = needed(nano(dp=2, ep=2))
    for recompute in Recompute:
        assert plan_for(nano(recompute=recompute.title(), dp=2, ep=2)).recompute is recompute
    with pytest.raises(InvalidConfigError, match=r"with spec\.training\.recompute: Selective it would fit") as refused:
        plan_for(nano(needs[Recompute.SELECTIVE], recompute="None", dp=2, ep=2))
    assert refused.value.field == "spec.training.recompute or spec.parallelism"


@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
def test_no_whole_layer_is_recomputed_with_a_zero_bubble_schedule(schedule: Schedule) -> None:
    piped: dict[str, Any] = {"dp": 1, "pp": 2, "schedule": str(schedule), "microbatches": 8}
    needs = needed(nano(**piped))
    assert plan_for(nano(needs[Recompute.SELECTIVE], **piped)).recompute is Recompute.SELECTIVE
    with pytest.raises(InvalidConfigError) as refused:
        plan_for(nano(needs[Recompute.FULL], **piped))
    assert (
        f"recompute full would make it fit, but cannot be combined with schedule {schedule}, which computes "
        "gradients of inputs and of weights separately" in refused.value.message
    )
    assert plan_for(nano(needs[Recompute.FULL], dp=1, pp=2, microbatches=8)).recompute is Recompute.FULL


def test_a_searched_layout_comes_with_its_recompute_mode() -> None:
    roomy = plan_for(nano())
    assert (roomy.recompute, roomy.recompute_label) == (Recompute.NONE, "")
    leanest = quick_search(setting_of(nano(MIB), roomy.shape), world=2, packs_per_step=PACKS).leanest
    assert leanest is not None
    just_less = int(leanest.memory.total_bytes / setting_of(nano(), roomy.shape).hardware.usable_share) - MIB
    tight = plan_for(nano(just_less))
    assert tight.recompute in {Recompute.SELECTIVE, Recompute.FULL}
    assert tight.recompute_label == str(tight.recompute).title()
    with pytest.raises(
        InvalidConfigError, match=rf"with spec\.training\.recompute: {tight.recompute_label} it would fit"
    ):
        plan_for(nano(just_less, recompute="None"))


@pytest.mark.slow
@given(
    world=st.sampled_from([2, 4, 8, 12]),
    memory_gib=st.integers(24, 160),
    tokens=st.sampled_from([4096, 16_384]),
    mixed=st.booleans(),
)
@settings(max_examples=6)
def test_no_choice_that_was_left_out_is_faster(world: int, memory_gib: int, tokens: int, mixed: bool) -> None:
    base = plan_settings.setting_of(tokens=tokens, numerics=MIXED if mixed else FLOAT32)
    setting = dataclasses.replace(base, hardware=dataclasses.replace(base.hardware, memory_bytes=memory_gib * 2**30))
    chosen, named = searched(setting, world, tuple(Recompute)), [searched(setting, world, (of,)) for of in Recompute]
    fitting = [of for of in named if of is not None]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        assert chosen[0] <= min(step_s for step_s, _ in fitting) * (1 + 1e-4)
        least = next(recompute for step_s, recompute in fitting if step_s <= chosen[0] * (1 + 1e-4))
        assert chosen[1] is least, "of equals the one that recomputes least"


def searched(setting: Setting, world: int, recomputes: tuple[Recompute, ...]) -> tuple[float, Recompute] | None:
    best = quick_search(setting, world=world, packs_per_step=8 * world, recomputes=recomputes).best
    return None if best is None else (best.step_s, best.candidate.recompute)


def test_where_all_fits_the_choice_is_that_of_a_search_without() -> None:
    setting = plan_settings.setting_of(shape=KIMI_VL_NANO, tokens=160, hardware="cpu")
    plain = quick_search(setting, world=8, packs_per_step=64)
    assert quick_search(setting, world=8, packs_per_step=64, recomputes=tuple(Recompute)) == plain


def test_curriculum_stages_with_more_tokens_recompute_more() -> None:
    def staged(memory_bytes: int) -> TrainingJobSpec:
        spec = nano(memory_bytes, dp=2, ep=2)
        stages = [{"name": "few", "steps": 1}, {"name": "many", "steps": 1, "packsPerStep": 4 * PACKS}]
        stages[1]["sequenceTokens"] = TOKENS // 2
        document = spec.model_dump(by_alias=True)
        document["training"]["stages"] = stages
        return TrainingJobSpec.model_validate(document)

    needs = needed(nano(dp=2, ep=2))
    assert plan_for(nano(needs[Recompute.NONE], dp=2, ep=2)).recompute is Recompute.NONE
    assert plan_for(staged(needs[Recompute.NONE])).recompute in {Recompute.SELECTIVE, Recompute.FULL}


def test_a_smaller_gang_may_recompute_more_than_a_larger_one() -> None:
    asked: dict[str, Any] = {"replicas": 4, "dp": 4, "microbatches": 1}
    memory_bytes = needed(sharded(nano(**asked)))[Recompute.NONE]
    spec = sharded(nano(memory_bytes, **asked))
    assert plan_for(spec, replicas=4).recompute is Recompute.NONE
    assert plan_for(spec, replicas=1).recompute is Recompute.SELECTIVE, "it holds the whole state, and as many packs"


def sharded(spec: TrainingJobSpec) -> TrainingJobSpec:
    """The same job, whose ranks divide the optimizer's state."""
    document = spec.model_dump(by_alias=True)
    document["training"]["optimizer"]["stateSharding"] = "Sharded"
    return TrainingJobSpec.model_validate(document)


def test_a_plan_of_an_earlier_version_is_read_and_leaves_it_to_the_job() -> None:
    spec = nano(recompute="Full", dp=2)
    earlier = json.loads(plan_for(nano(dp=2)).to_json())
    del earlier["recompute"]
    plan = Plan.from_json(json.dumps(earlier))
    assert plan.recompute is None
    assert plan.recompute_of(spec) is Recompute.FULL
    assert plan.recompute_of(nano(dp=2)) is Recompute.NONE, "such a version knew no other default"
    assert Plan.from_json(plan.to_json()) == plan


def test_recompute_is_part_of_the_plans_hash_and_overrides_the_job() -> None:
    plain, recomputed = plan_for(nano(dp=2)), plan_for(nano(recompute="Selective", dp=2))
    assert plain.hash != recomputed.hash
    assert Plan.from_json(recomputed.to_json()) == recomputed
    assert recomputed.recompute_of(nano(recompute="Full", dp=2)) is Recompute.SELECTIVE
    damaged = json.loads(recomputed.to_json()) | {"recompute": "full"}
    with pytest.raises(InvalidConfigError, match="plan is damaged"):
        Plan.from_json(json.dumps(damaged))


def test_a_job_allows_the_recompute_mode_it_names_or_all() -> None:
    assert recomputes_of(nano()) == (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    assert recomputes_of(nano(recompute="Selective")) == (Recompute.SELECTIVE,)
