"""Objectives that can't be meant are refused with the field and the rule, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.loading import load_job
from tests.unit.api.jobs import job_with

REWARDED: dict[str, Any] = {"kind": "GroupRelative", "reward": "a:b"}
EARLY = {"spec.data.startWhileProcessing": True, "spec.data.tokenizer": {"location": "file:///tokenizer"}}


@pytest.mark.parametrize(
    ("objective", "more", "words"),
    [
        ({"beta": "0.2"}, {}, "beta is given for kind Supervised; only kind Preference has it: use kind: Preference"),
        ({"kind": "Preference", "beta": "0"}, {}, "beta 0 is outside its range: above 0, at most 1000"),
        (
            {"kind": "Preference", "labelSmoothing": "0.5"},
            {},
            "labelSmoothing 0.5 is outside its range: from 0 to below",
        ),
        (
            {"kind": "Preference", "labelSmoothing": "0.1", "loss": "IPO"},
            {},
            "labelSmoothing 0.1 cannot be combined with loss IPO, which has no sigmoid to smooth",
        ),
        (
            {**REWARDED, "generation": {"weights": "Int4"}},
            {"spec.training.parameterSharding": "FSDP2"},
            "objective.generation.weights Int4 cannot be combined with training.parameterSharding FSDP2, with which no",
        ),
        (
            {"kind": "Preference"},
            {"spec.training.capacityFactor": "1.25"},
            "capacityFactor 1.25 cannot be combined with the objective of stage 'a'",
        ),
        (
            {"kind": "Preference", "reference": {"scores": "Online", "name": "mine"}},
            {},
            "reference.name 'mine' cannot be combined with scores Online: other programs store its scores before",
        ),
        ({"kind": "GroupRelative"}, {}, "reward is missing for kind GroupRelative; name a function as module:function"),
        ({"kind": "GroupRelative", "reward": "exact"}, {}, "must be package.module:function"),
        ({"kind": "Preference", "reward": "a:b"}, {}, "reward is given for kind Preference; only kind GroupRelative"),
        (
            {"kind": "Preference", "generation": {"parallelism": {"ep": 2}}},
            {},
            "generation is given for kind Preference; only kind GroupRelative has it",
        ),
        ({**REWARDED, "beta": "0.2"}, {}, "beta is given for kind GroupRelative; only kind Preference has it"),
        ({**REWARDED, "samples": 1}, {}, "samples"),
        ({**REWARDED, "temperature": "0"}, {}, "temperature 0 is outside its range: above 0, at most 10"),
        ({**REWARDED, "correctionLimit": "0.5"}, {}, "correctionLimit 0.5 is outside its range: at least 1"),
        (REWARDED, {"spec.training.capacityFactor": "1.25"}, "cannot be combined with the objective of stage 'a'"),
        (
            {**REWARDED, "answerTokens": 600, "samples": 4},
            {"spec.data.sequenceTokens": 2400},
            "stage 'a' leaves no room for a prompt: its answers take samples x answerTokens = 2400 tokens, its packs",
        ),
        (REWARDED, EARLY, "stage 'a' leaves room for answers in its packs"),
        ({"kind": "Preference"}, EARLY, "stage 'a' scores all of its pairs before its first step"),
    ],
    ids=str,
)
def test_a_wrong_objective_is_refused(objective: dict[str, Any], more: dict[str, Any], words: str) -> None:
    stages = [{"name": "a", "steps": 4, "objective": objective}]
    with pytest.raises(InvalidConfigError) as refused:
        load_job(job_with({"spec.training.steps": 4, "spec.training.stages": stages, **more}))
    assert words in str(refused.value)


def test_defaults_that_an_api_server_fills_in_are_no_objective() -> None:
    filled = {"kind": "Supervised", "loss": "Sigmoid", "beta": "0.1", "reference": {"scores": "Cached"}}
    stages = [{"name": "a", "steps": 4, "objective": filled}]
    (stage,) = load_job(job_with({"spec.training.steps": 4, "spec.training.stages": stages})).spec.training.stages
    assert stage.objective is not None
    assert not stage.objective.compares


def test_pairs_that_are_scored_in_each_step_need_not_all_be_processed() -> None:
    stage = {"name": "a", "steps": 4, "objective": {"kind": "Preference", "reference": {"scores": "Online"}}}
    job = load_job(job_with({"spec.training.steps": 4, "spec.training.stages": [stage], **EARLY}))
    (asked,) = job.spec.training.stages
    assert asked.objective is not None
    assert (asked.objective.compares, job.spec.training.scored_before) == (True, [])
