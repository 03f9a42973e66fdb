"""Curriculum stages depend on the job and the step alone, and are refused if they can't be trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.load import parse_new_job
from polyreme_api.job.model import Stage
from polyreme_planner.curriculum import (
    Learner,
    curriculum_stages,
    kinds_of_packs,
    packs_of_stages,
    stage_at,
    times_learned,
)
from polyreme_planner.layout import gives_each_packs, packs_of_rank
from polyreme_planner.mixture import mixture_changes
from polyreme_planner.plan import plan_for

STAGES: list[dict[str, Any]] = [
    {"name": "align", "steps": 10, "trains": ["Tower", "Projector"]},
    {"name": "joint", "steps": 40, "learningRate": "2e-3", "warmupSteps": 5, "ropeTheta": 50_000},
    {"name": "cool-down", "steps": 20, "weights": [{"source": "good", "weight": 1}]},
    {"name": "long", "steps": 30, "ropeTheta": 800_000, "sequenceTokens": 256, "packsPerStep": 2},
]
SPEC: dict[str, Any] = {
    "model": {"preset": "kimi-vl-nano"},
    "data": {
        "sources": [
            {"name": "good", "dataset": "sample/digits-1"},
            {"name": "rest", "dataset": "sample/digits-2", "weight": 3},
        ],
        "schedule": [{"fromStep": 31, "weights": [{"source": "rest", "weight": 1}]}],
        "sequenceTokens": 64,
    },
    "training": {"steps": 100, "packsPerStep": 8, "stages": STAGES},
    "parallelism": {"mode": "Explicit", "dp": 2},
    "workers": {"replicas": 2},
}


def spec(change: Any = lambda given: None) -> TrainingJobSpec:
    given = copy.deepcopy(SPEC)
    change(given)
    job = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "t"}, "spec": given}
    return parse_new_job(job).spec


def test_stages_follow_each_other_and_inherit_positions() -> None:
    stages = curriculum_stages(spec())
    assert [(stage.name, stage.first_step, stage.last_step) for stage in stages] == [
        ("align", 1, 10),
        ("joint", 11, 50),
        ("cool-down", 51, 70),
        ("long", 71, 100),
    ]
    assert [stage.rope_theta for stage in stages] == [None, 50_000.0, 50_000.0, 800_000.0]
    assert [stage.rate is None for stage in stages] == [True, False, True, True]
    assert stages[0].learners == {Learner.TOWER, Learner.PROJECTOR}
    assert [stage_at(stages, step).name for step in (1, 10, 11, 50, 51, 100, 101)] == [
        "align", "align", "joint", "joint", "cool-down", "long", "long",
    ]  # fmt: skip


def test_a_part_counts_the_steps_in_which_it_has_learned() -> None:
    stages = curriculum_stages(spec())
    assert times_learned(stages, 10) == {Learner.TOWER: 10, Learner.PROJECTOR: 10}
    assert times_learned(stages, 11) == {Learner.TOWER: 11, Learner.PROJECTOR: 11, Learner.DECODER: 1}
    assert times_learned(stages, 100) == {Learner.TOWER: 100, Learner.PROJECTOR: 100, Learner.DECODER: 90}


def test_a_job_without_stages_is_one_stage_of_all() -> None:
    alone = spec(lambda given: given["training"].pop("stages"))
    (stage,) = curriculum_stages(alone)
    assert (stage.name, stage.steps, stage.rope_theta, stage.rate) == ("", 100, None, None)
    assert times_learned((stage,), 7) == dict.fromkeys(Learner, 7)
    assert [(packs.per_step, packs.tokens) for packs in packs_of_stages(alone)] == [(8, 64)]


def test_packs_differ_by_stage_and_the_longest_is_planned_first() -> None:
    assert [(packs.per_step, packs.tokens) for packs in packs_of_stages(spec())] == [(8, 64)] * 3 + [(2, 256)]
    assert [(packs.tokens, packs.stage) for packs in kinds_of_packs(spec())] == [(256, "long"), (64, "align")]


def test_weights_of_stages_and_of_the_schedule_are_one_row_of_changes() -> None:
    assert [change.from_step for change in mixture_changes(spec())] == [31, 51]


def _steps(given: dict[str, Any]) -> None:
    given["training"]["steps"] = 90


def _name(given: dict[str, Any]) -> None:
    given["training"]["stages"][1]["name"] = "align"


def _source(given: dict[str, Any]) -> None:
    given["training"]["stages"][2]["weights"] = [{"source": "bad", "weight": 1}]


def _zero(given: dict[str, Any]) -> None:
    given["training"]["stages"][2]["weights"] = [{"source": "good", "weight": 0}]


def _twice(given: dict[str, Any]) -> None:
    given["data"]["schedule"][0]["fromStep"] = 51


def _trains(given: dict[str, Any]) -> None:
    given["training"]["stages"][0]["trains"] = []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_steps, "steps of stages add up to 100, steps is 90; change steps to 100, or those of a stage"),
        (_name, "two stages are named 'align'; names are unique"),
        (_source, "training.stages is refused: 'cool-down' weighs source 'bad', sources are good, rest"),
        (_zero, "training.stages is refused: 'cool-down' gives every source weight 0"),
        (_twice, "'cool-down' gives weights from step 51 on, and so does data.schedule; drop one"),
        (_trains, "number of entries must be 1 or more"),
    ],
)
def test_stages_that_can_not_be_are_refused(change: Any, words: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        spec(change)
    assert words in str(refused.value)


def test_a_stage_in_which_nothing_of_the_model_learns_is_refused() -> None:
    def decoder_alone(given: dict[str, Any]) -> None:
        given["model"]["preset"] = "moonlight-16b-a3b"

    with pytest.raises(InvalidConfigError, match=r"stage 'align' trains nothing: model moonlight-16b-a3b is a decoder"):
        plan_for(spec(decoder_alone))


def test_one_layout_holds_all_stages_or_the_job_is_refused() -> None:
    assert plan_for(spec()).layout.dp == 2

    def lone(packs: int) -> Any:
        return lambda given: given["training"]["stages"][1].update(packsPerStep=packs)

    assert plan_for(spec(lone(7))).layout.dp == 2, "one of the eight places is a null pack"
    with pytest.raises(InvalidConfigError, match=r"dp2 of the longest packs does not fit stage 'joint'.*1 leaves"):
        plan_for(spec(lone(1)))

    def vast(given: dict[str, Any]) -> None:
        given["training"]["stages"][2]["packsPerStep"] = 1_000_000

    with pytest.raises(InvalidConfigError, match=r"does not fit stage 'cool-down': layout does not fit cpu"):
        plan_for(spec(vast))


def test_a_gang_of_any_size_trains_the_same_tokens_a_step_or_is_refused() -> None:
    """So no learning rate is ever rescaled: what a step is made of does not depend on who makes it."""
    for replicas in (1, 2):
        plan = plan_for(spec(), replicas=replicas)
        for packs in packs_of_stages(spec()):
            assert gives_each_packs(packs.per_step, plan.layout.dp)
            assert packs_of_rank(packs.per_step, plan.layout.dp) % plan.cut.microbatches == 0
    for replicas in range(3, 9):
        with pytest.raises(InvalidConfigError, match=rf"fit stage 'long'.*leaves ranks of dp {replicas} without"):
            plan_for(spec(), replicas=replicas)


def test_a_layout_that_is_searched_for_holds_all_stages() -> None:
    def auto(given: dict[str, Any]) -> None:
        given["parallelism"] = {"mode": "Auto"}
        given["workers"] = {"replicas": 1, "devices": 2}

    plan = plan_for(spec(auto))
    assert plan.layout.world == 2
    assert all(gives_each_packs(packs.per_step, plan.layout.dp) for packs in packs_of_stages(spec(auto)))


OTHER: dict[str, Any] = {
    "name": "other",
    "steps": 5,
    "trains": ["Decoder"],
    "learningRate": "0.5",
    "finalLearningRate": "0.5",
    "schedule": "Cosine",
    "warmupSteps": 3,
    "decaySteps": 3,
    "ropeTheta": 7,
    "packsPerStep": 16,
    "sequenceTokens": 32,
    "objective": {"kind": "Preference"},
    "weights": [{"source": "rest", "weight": 2}],
}
"""A value for each field of a stage that the first one does not have."""


def test_every_field_of_a_stage_is_read() -> None:
    def read(given: TrainingJobSpec) -> tuple[Any, ...]:
        return curriculum_stages(given), packs_of_stages(given), mixture_changes(given)

    usual = read(spec())
    assert set(OTHER) == {info.alias for info in Stage.model_fields.values()} | {"name", "steps"}
    for field, value in OTHER.items():

        def change(given: dict[str, Any], field: str = field, value: Any = value) -> None:
            given["training"]["stages"][0][field] = value
            given["training"]["steps"] = sum(stage["steps"] for stage in given["training"]["stages"])

        assert read(spec(change)) != usual, field
