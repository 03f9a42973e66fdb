"""A step is cut into stages and microbatches that torch's schedules can run, and the plan carries the cut."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.workers import STAGES_MEET, Parallelism
from polyreme_planner.loading import load_job
from polyreme_planner.pipelines import Cut, accumulated_microbatches, cut_step, fitting_microbatches
from polyreme_planner.plan import Plan, plan_for
from polyreme_planner.schedules import V_SHAPED, Schedule, schedule_misfits, stages_per_rank
from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO
from tests.unit.api.jobs import job_with

PIPED = {
    "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "DualPipeV"},
    "spec.workers": {"replicas": 2, "minReplicas": 2, "maxReplicas": 4},
}


def test_the_job_names_the_schedules_of_the_planner() -> None:
    named = typing.get_args(typing.get_args(Parallelism.model_fields["schedule"].annotation)[0])
    assert set(named) == {str(schedule) for schedule in Schedule}
    assert set(STAGES_MEET) == {str(schedule) for schedule in V_SHAPED}


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_a_job_refuses_the_microbatches_that_the_schedule_can_not_run(schedule: Schedule, pp: int) -> None:
    for count in range(1, 6 * pp):
        fits = not schedule_misfits(schedule, ranks=pp, microbatches=count)
        asked = {"mode": "Explicit", "dp": 1, "pp": pp, "schedule": str(schedule), "microbatches": count}
        if fits:
            assert Parallelism.model_validate(asked).microbatches == count
            continue
        with pytest.raises(ValueError, match="microbatches") as refused:
            Parallelism.model_validate(asked)
        words = str(refused.value).split("microbatches to ")[1].split("\n")[0].split(" [")[0]
        for near in (int(word) for word in words.split() if word.isdigit()):
            assert not schedule_misfits(schedule, ranks=pp, microbatches=near), (count, near)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_layer_lies_on_one_stage_and_none_between_the_ends_is_empty(schedule: Schedule) -> None:
    for pp in (2, 3, 4, 8):
        cut = cut_step(KIMI_VL_A3B, pp=pp, packs_per_rank=4 * pp, pack_tokens=4096, schedule=schedule)
        assert len(cut.stage_layers) == pp * stages_per_rank(schedule)
        assert sum(cut.stage_layers) == KIMI_VL_A3B.decoder.layers
        assert min(cut.stage_layers[1:-1], default=1) >= 1
        assert cut.microbatches == 4 * pp


def test_the_tower_is_priced_so_the_first_stage_gets_fewer_layers() -> None:
    cut = cut_step(KIMI_VL_A3B, pp=4, packs_per_rank=8, pack_tokens=4096)
    assert cut.stage_layers[0] < min(cut.stage_layers[1:3])


def test_microbatches_fit_the_packs() -> None:
    assert fitting_microbatches(Schedule.DUAL_PIPE_V, pp=2, packs_per_rank=12) == [4, 6, 12]
    assert fitting_microbatches(Schedule.INTERLEAVED, pp=2, packs_per_rank=10) == [2, 10]
    assert fitting_microbatches(None, pp=1, packs_per_rank=6) == [1, 2, 3, 6]
    assert cut_step(KIMI_VL_NANO, pp=1, packs_per_rank=6, pack_tokens=96) == Cut()
    assert cut_step(KIMI_VL_NANO, pp=1, packs_per_rank=6, pack_tokens=96, microbatches=3) == Cut(microbatches=3)
    with pytest.raises(
        InvalidConfigError, match=r"4 microbatches do not divide the 6 packs.*numbers that fit: 3, 2, 6"
    ):
        cut_step(KIMI_VL_NANO, pp=1, packs_per_rank=6, pack_tokens=96, microbatches=4)


def test_the_plan_carries_the_cut_under_its_hash() -> None:
    plan = plan_for(load_job(job_with(PIPED)).spec)
    assert plan.cut == Cut(schedule=Schedule.DUAL_PIPE_V, stage_layers=plan.cut.stage_layers, microbatches=4)
    assert [volume.axis for volume in plan.volumes] == ["pp"]
    assert Plan.from_json(plan.to_json()) == plan
    other = dataclasses.replace(plan, cut=dataclasses.replace(plan.cut, stage_layers=(1, 1, 1, 0)))
    assert other.hash != plan.hash
    damaged = json.loads(plan.to_json())
    damaged["cut"]["stage_layers"] = [0, 1, 1, 1]
    with pytest.raises(InvalidConfigError, match="plan is damaged"):
        Plan.from_json(json.dumps(damaged))


def piped(**parallelism: Any) -> dict[str, Any]:
    given = {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "DualPipeV", "microbatches": 4}
    model = {"preset": "kimi-vl-nano", "overrides": {"decoder": {"layers": 5}}}
    changes = {"spec.model": model, "spec.training.packsPerStep": 8, "spec.parallelism": given | parallelism}
    return job_with(PIPED | changes)


def test_layers_that_a_job_names_are_the_plans_at_every_size_of_its_gang() -> None:
    spec = load_job(piped(stageLayers=[0, 3, 1, 1])).spec
    for replicas in (2, 4):
        assert plan_for(spec, replicas=replicas).cut.stage_layers == (0, 3, 1, 1)
    assert plan_for(load_job(piped()).spec).cut.stage_layers != (0, 3, 1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stageLayers": [1, 2, 1]}, "schedule DualPipeV over pp 2 has 4 stages, stageLayers has 3 numbers"),
        ({"stageLayers": [2, 0, 2, 1]}, "stageLayers [2, 0, 2, 1] leaves a stage between the first and the last"),
        ({"stageLayers": [1, 2, 1, 2]}, "1 2 1 2 are 6 layers on 4 stages, the model has 5 and the schedule 4"),
        ({"stageLayers": [2, 3], "pp": 1, "schedule": None}, "stageLayers needs pp of at least 2, seen 1"),
        (
            {"mode": "Auto", "stageLayers": [2, 3]} | dict.fromkeys(("dp", "pp", "schedule", "microbatches")),
            "mode Auto chooses the degrees itself, stageLayers is set",
        ),
    ],
)
def test_layers_that_are_not_those_of_the_stages_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load_job(piped(**changes))
    assert words in str(refused.value)
    assert "spec.parallelism" in str(refused.value)


def test_at_another_size_the_microbatches_fit_themselves_to_the_packs() -> None:
    asked = {"mode": "Explicit", "dp": 1, "pp": 2, "microbatches": 4}
    spec = load_job(job_with({**PIPED, "spec.parallelism": asked})).spec
    assert plan_for(spec, replicas=2).cut.microbatches == 4
    assert plan_for(spec, replicas=4).cut.microbatches == 2


def test_fewer_ranks_accumulate_and_no_microbatch_takes_more_packs_than_before() -> None:
    def at(packs_per_rank: int, schedule: Schedule | None = None, pp: int = 1) -> int | None:
        return accumulated_microbatches(schedule, pp=pp, packs_per_rank=packs_per_rank, packs=2)

    assert [at(packs) for packs in (1, 2, 4, 6, 8)] == [1, 1, 2, 3, 4]
    assert at(3) == 3, "two microbatches do not divide three packs"
    assert at(8, Schedule.ZBV, pp=4) == 8, "so many does the schedule need"
    assert at(2, Schedule.ZBV, pp=4) is None


def test_a_resized_job_keeps_the_packs_of_a_microbatch() -> None:
    spec = load_job(job_with({"spec.training.packsPerStep": 8, "spec.parallelism": {"mode": "Explicit", "dp": 1}})).spec
    written = plan_for(spec)
    assert (written.layout.dp, written.cut.microbatches) == (1, 1)
    halved = spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update={"dp": 2})})
    assert plan_for(halved, replicas=1).cut.microbatches == 2
    assert plan_for(halved, replicas=4).cut.microbatches == 1
