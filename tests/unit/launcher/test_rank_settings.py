"""Every field of the spec that concerns the trainer reaches it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from polyreme_api import environment as names
from polyreme_api.environment import RankEnvironment
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.data import Evaluation
from polyreme_api.job.model import ModelPart, Optimizer, Training, Weights
from polyreme_api.job.policy import Health, LossSpike
from polyreme_api.job.workers import Checkpoint, Export, Parallelism
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.objects import open_store
from polyreme_launcher import rank as rank_module
from polyreme_launcher.rank import RENDEZVOUS_S, settings_of
from polyreme_planner.costs import Recompute
from polyreme_planner.plan import plan_for
from polyreme_trainer.train.settings import EarlyStopRule, TrainSettings

SPEC: dict[str, Any] = {
    "model": {"preset": "kimi-vl-nano", "overrides": {"decoder": {"layers": 3}}},
    "data": {"sources": [{"name": "digits", "dataset": "digits"}], "sequenceTokens": 96},
    "training": {"steps": 100, "packsPerStep": 8, "optimizer": {}},
    "parallelism": {"mode": "Explicit", "dp": 4, "ep": 2},
    "workers": {"replicas": 2, "devices": 2},
    "checkpoint": {},
    "evaluation": {"everySteps": 10, "sets": [{"name": "held-out", "dataset": "others"}]},
    "export": {},
}
CHANGES: dict[str, Any] = {
    "model.preset": "kimi-vl-a3b",
    "model.overrides.decoder.layers": 4,
    "model.overrides.vision": {"layers": 1},
    "model.weights.location": "file:///weights",
    "training.steps": 101,
    "training.stages": [{"name": "all", "steps": 60}, {"name": "more", "steps": 40}],
    "training.seed": 7,
    "training.adapters": {"rank": 8, "alpha": "16", "targets": ["Attention"]},
    "training.routerBiasRate": "0.5",
    "training.capacityFactor": "1.5",
    "training.recompute": "Selective",
    "training.precision": "bfloat16",
    "training.optimizer.name": "Muon",
    "training.optimizer.learningRate": "0.5",
    "training.optimizer.finalLearningRate": "0.5",
    "training.optimizer.schedule": "Cosine",
    "training.optimizer.momentum": "0.5",
    "training.parameterSharding": "FSDP2",
    "training.optimizer.stateSharding": "Sharded",
    "training.optimizer.stateMemory": "Host",
    "training.optimizer.beta1": "0.5",
    "training.optimizer.beta2": "0.5",
    "training.optimizer.epsilon": "0.5",
    "training.optimizer.weightDecay": "0.5",
    "training.optimizer.clipNorm": "0.5",
    "training.optimizer.warmupSteps": 9,
    "training.optimizer.decaySteps": 9,
    "parallelism.ep": 4,
    "parallelism.microbatches": 2,
    "parallelism.imagesOver": "Data",
    "checkpoint.everySteps": 7,
    "checkpoint.keep": 7,
    "checkpoint.keepBest": 7,
    "checkpoint.maxAgeSeconds": 7,
    "evaluation.everySteps": 7,
    "evaluation.samplesMax": 7,
    "evaluation.answerTokensMax": 7,
    "evaluation.cache": "Int8",
    "evaluation.weights": "Int4",
    "evaluation.thinkingTokensMax": 3,
    "export.location": "file:///elsewhere",
    "health.firstStepTimeoutSeconds": 77,
    "health.collectiveTimeoutSeconds": 77,
    "health.parameterHashSteps": 77,
    "health.loss.action": "Skip",
    "health.loss.windowSteps": 77,
    "health.loss.deviations": 77,
    "health.loss.updateNormSteps": 7,
}
"""A value for each field that is not its default."""
OF_THE_PLAN = {"checkpoint.plan_hash", "checkpoint.plan"}
ELSEWHERE = {
    "model.overrides": "in its parts",
    "model.weights": "in its parts",
    "model.weights.format": "one value",
    "training.optimizer": "in its parts",
    "training.epochs": "counted as steps, when the data are processed",
    "training.packsPerStep": "the data source, and the plan",
    "training.tf32": "the device that the rank takes",
    "parallelism.mode": "the plan",
    "parallelism.dp": "the plan, with the workers",
    "parallelism.pp": "the plan, with dp",
    "parallelism.cp": "the plan, with dp",
    "parallelism.tp": "the plan, with dp",
    "parallelism.schedule": "the plan, with pp",
    "parallelism.stageLayers": "the plan, with pp",
    "checkpoint.location": "the environment of the pod",
    "checkpoint.preemptionGraceSeconds": "the operator",
    "evaluation.sets": "the data source",
    "evaluation.earlyStop": "only together with evaluation.everySteps",
    "export.format": "one value",
    "export.adapters": "only together with training.adapters",
    "health.heartbeatTimeoutSeconds": "the operator",
    "health.nodeLostSeconds": "the operator",
    "health.startTimeoutSeconds": "the operator",
    "health.hang": "the operator",
    "health.stragglers": "the operator",
    "health.loss": "in its parts",
}
PARTS: dict[str, type[BaseModel]] = {
    "model": ModelPart,
    "model.weights": Weights,
    "training": Training,
    "training.optimizer": Optimizer,
    "parallelism": Parallelism,
    "checkpoint": Checkpoint,
    "evaluation": Evaluation,
    "export": Export,
    "health": Health,
    "health.loss": LossSpike,
}


RANK = RankEnvironment(
    rank=1,
    local_rank=1,
    world_size=4,
    master_address="127.0.0.1",
    master_port=1,
    master_fd=None,
    progress_fd=None,
    attempt=3,
    job_file="",
    plan_file="",
    checkpoint_url="file:///checkpoints",
    resume_from="a000002-s00000005",
)


def settings(spec: dict[str, Any], *, exported: str = "file:///export") -> TrainSettings:
    parsed = TrainingJobSpec.model_validate(spec)
    environment = {names.EXPORT_URL: exported}
    return settings_of(environment, RANK, parsed, plan_for(parsed))


def changed(field: str, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(SPEC)
    *path, last = field.split(".")
    part = spec
    for name in path:
        part = part.setdefault(name, {})
    part[last] = value
    return spec


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_changes_what_the_trainer_gets(field: str) -> None:
    spec = changed(field, CHANGES[field])
    if field == "model.preset":
        spec["model"].pop("overrides")
        container = {"name": "worker", "resources": {"limits": {"memory": "4Ti"}}}
        spec["workers"]["template"] = {"spec": {"containers": [container]}}  # or no plan would fit
    seen = _differences(settings(spec), settings(SPEC))
    assert seen - OF_THE_PLAN, "more than the plan"


def test_no_two_fields_land_in_the_same_place() -> None:
    usual = settings(SPEC)
    places = [
        frozenset(_differences(settings(changed(field, value)), usual) - OF_THE_PLAN)
        for field, value in CHANGES.items()
        if not field.startswith("model.")
    ]
    assert all(len(place) == 1 for place in places), places
    assert len(set(places)) == len(places)


def test_every_field_is_either_here_or_known_to_go_elsewhere() -> None:
    fields = {
        f"{part}.{info.alias or name}" for part, model in PARTS.items() for name, info in model.model_fields.items()
    }
    assert fields == {field for field in CHANGES | ELSEWHERE if not field.startswith("model.overrides.")}


def test_the_rule_of_an_early_stop_reaches_the_trainer() -> None:
    spec = changed("evaluation.everySteps", 7)
    assert settings(spec).evaluation.early_stop is None
    spec["evaluation"]["earlyStop"] = {"patience": 2, "minDelta": "0.01"}
    assert settings(spec).evaluation.early_stop == EarlyStopRule(patience=2, min_delta=0.01)


def test_adapters_are_exported_alone_if_the_job_says_so() -> None:
    spec = changed("training.adapters", CHANGES["training.adapters"])
    assert not settings(spec).adapters_alone
    spec["export"] = {"adapters": "Alone"}
    assert settings(spec).adapters_alone


def test_a_pipeline_reaches_the_trainer_with_its_schedule() -> None:
    spec = changed("parallelism", {"mode": "Explicit", "dp": 1, "pp": 4, "schedule": "DualPipeV", "microbatches": 8})
    spec["model"]["overrides"]["decoder"]["layers"] = 8
    seen = settings(spec)
    assert (seen.layout.pp, seen.pipeline.schedule, seen.pipeline.microbatches) == (4, "DualPipeV", 8)
    assert (len(seen.pipeline.layers), sum(seen.pipeline.layers)) == (8, 8)


def test_recompute_options_come_from_the_plan() -> None:
    container = {"name": "worker", "resources": {"limits": {"memory": "150Mi"}}}
    tight = changed("workers.template", {"spec": {"containers": [container]}})
    tight["data"]["sequenceTokens"] = 960
    seen = settings(tight)
    tight["training"]["recompute"] = "Selective"
    named = settings(tight)
    assert seen.compute_options.recompute is Recompute.SELECTIVE
    assert seen.checkpoint.plan == named.checkpoint.plan
    assert seen.compute_options == named.compute_options


def test_waits_for_data_extend_the_limits_that_they_would_exceed() -> None:
    usual = settings(SPEC).rank
    assert (usual.collective_timeout_s, usual.rendezvous_timeout_s) == (120.0, RENDEZVOUS_S + 600.0)
    spec = changed("data.startWhileProcessing", True)
    spec["data"] |= {"waitSeconds": 50, "tokenizer": {"location": "file:///tokenizer"}}
    seen = settings(spec).rank
    assert (seen.first_step_timeout_s, seen.collective_timeout_s) == (650.0, 170.0)
    assert seen.rendezvous_timeout_s == RENDEZVOUS_S + 50.0


def test_what_is_no_field_comes_from_the_environment() -> None:
    seen = settings(SPEC)
    assert seen.checkpoint.store == open_store("file:///checkpoints")
    assert seen.checkpoint.folder == Path("/checkpoints")
    assert seen.checkpoint.resume_from == "a000002-s00000005"
    assert (seen.rank.rank, seen.rank.world, seen.rank.attempt) == (1, 4, 3)
    assert seen.export_to == Path("/export")
    assert settings({**SPEC, "export": None}).export_to is None


def test_an_export_goes_where_the_job_says_else_where_the_installation_says_else_beside_the_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no request is made
    assert str(settings(changed("export.location", "s3://bucket/models")).export_to) == "s3://bucket/models"
    assert settings(SPEC, exported="").export_to == Path("/checkpoints/export")


@pytest.mark.parametrize("engine", [False, True], ids=["direct", "data engine"])
def test_the_loader_gets_how_the_plan_splits_a_step(monkeypatch: pytest.MonkeyPatch, engine: bool) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(rank_module, "EngineSource", lambda _, asked, **__: seen.append(asked.split))
    monkeypatch.setattr(rank_module, "open_packs", lambda *_, split, **__: seen.append(split))
    monkeypatch.setattr(rank_module, "open_held_out", lambda *_, **__: None)
    monkeypatch.setattr(rank_module, "read_mixture", lambda *_: None)
    spec = TrainingJobSpec.model_validate(changed("parallelism.microbatches", 2))
    environment = {names.OBJECTS_URL: "", names.JOB_UID: "", **({names.DATA_ENGINE_FD: "9"} if engine else {})}
    rank_module._open_data(environment, RANK, spec, plan_for(spec), None)
    assert seen == [StepSplit(data_ranks=4, microbatches=2)]


def test_other_ranks_than_the_plans_are_refused() -> None:
    spec = copy.deepcopy(SPEC)
    spec["workers"]["replicas"], spec["parallelism"]["dp"] = 4, 8
    with pytest.raises(InvalidConfigError, match="ranks do not fit the plan: WORLD_SIZE is 4"):
        settings(spec)


def _differences(one: Any, other: Any, prefix: str = "") -> set[str]:
    return set(_differing(one, other, prefix))


def _differing(one: Any, other: Any, prefix: str) -> Iterator[str]:
    for name in one.__dataclass_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine == theirs:
            continue
        if all(hasattr(value, "__dataclass_fields__") for value in (mine, theirs)):
            yield from _differing(mine, theirs, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
