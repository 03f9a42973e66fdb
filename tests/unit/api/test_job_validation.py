"""What a TrainingJob refuses, and in which words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.fields import PATTERN_WORDS
from polyreme_api.job import parse_job
from polyreme_api.job.load import parse_new_job
from polyreme_api.job.schedule import schedule_faults
from polyreme_api.kinds import KINDS
from polyreme_api.pod_template import QUANTITY_PATTERN
from polyreme_planner.layout import Layout
from polyreme_planner.loading import load_job
from polyreme_planner.mixture import mixture_changes
from polyreme_planner.plan import Plan, plan_for
from tests.unit.api.jobs import DROP, SMALLEST, job_with

ONE = {"name": "one", "dataset": "sample/one"}
BY_EPOCHS = {"epochs": 3, "packsPerStep": 1}
EARLY = {"spec.data.startWhileProcessing": True, "spec.data.tokenizer": {"location": "file:///tokenizer"}}
RULE = {"operator": "In", "values": [2]}
DISRUPTED = [{"type": "DisruptionTarget"}]


def adapters(rank: int, alpha: str = "8", *targets: str) -> dict[str, Any]:
    """``training.adapters``."""
    return {"rank": rank, "alpha": alpha, "targets": list(targets) or ["Attention", "Dense", "Experts"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    # structure
    ({"spec.trainng": {}}, "unknown field: spec.trainng, did you mean 'training'?"),
    ({"spec.data.sources.0.datset": "x"}, "unknown field: spec.data.sources.0.datset, did you mean 'dataset'?"),
    ({"spec.evaluation": {"zzz": 1, "sets": [ONE]}}, "known fields are answerTokensMax, cache, earlyStop, every"),
    ({"spec.model": DROP}, "field missing: spec.model is required"),
    ({"spec.data": DROP}, "field missing: spec.data is required"),
    ({"spec.model": DROP, "spec.training": DROP}, "field missing: spec.model is required (and 1 more)"),
    ({"spec.model": DROP, "spec.modle": {}}, "unknown field: spec.modle, did you mean 'model'?"),
    ({"spec.workers.runtime": {"mode": "Torchrun"}}, "spec.workers.runtime.mode is refused: 'Torchrun'"),
    ({"spec.queueName": "A.b"}, "spec.queueName is refused: 'A.b'"),
    ({"spec.training.packsPerStep": DROP}, "field missing: spec.training.packsPerStep is required"),
    ({"apiVersion": "polyreme.dev/v2"}, "apiVersion is refused: 'polyreme.dev/v2'"),
    ({"kind": "Job"}, "kind is refused: 'Job'"),
    ({"metadata.name": "Small"}, "metadata.name is refused: 'Small'"),
    ({"metadata.name": "a" * 41}, "metadata.name is refused"),
    ({"metadata.name": "a.b"}, "metadata.name is refused: 'a.b'"),
    # types and bounds
    ({"spec.training.steps": 0}, "spec.training.steps is refused: 0, must be 1 or more"),
    ({"spec.training.steps": "10"}, "spec.training.steps is refused: '10'"),
    ({"spec.training.steps": True}, "spec.training.steps is refused: True"),
    ({"spec.suspend": "yes"}, "spec.suspend is refused: 'yes'"),
    ({"spec.data.sequenceTokens": 8}, "spec.data.sequenceTokens is refused: 8"),
    ({"spec.data.sources": []}, "spec.data.sources is refused: []"),
    ({"spec.workers.replicas": 15_001}, "spec.workers.replicas is refused: 15001"),
    ({"spec.model.overrides": {"decoder": {"layers": -1}}}, "spec.model.overrides.decoder.layers is refused: -1"),
    (
        {"spec.model.overrides": {"decoder": {"routed_scaling": 2.5}}},
        'a decimal is written as text, in quotes: "2.5" (Kubernetes APIs carry no floats)',
    ),
    ({"spec.model.overrides": {"decoder": {"layers": True}}}, "a count is a whole number, and a decimal"),
    (
        {"spec.model.overrides": {"decoder": {"norm_eps": "tiny"}}},
        "a decimal of zero or more has at most 32 characters",
    ),
    ({"spec.checkpoint": {"keep": 0}}, "spec.checkpoint.keep is refused: 0"),
    ({"spec.data.sources.0.dataset": "Sample One"}, "spec.data.sources.0.dataset is refused: 'Sample One'"),
    # decimals are text
    (
        {"spec.training.optimizer": {"learningRate": 0.002}},
        'a decimal is written as text, in quotes: "0.002" (Kubernetes APIs carry no floats)',
    ),
    ({"spec.training.optimizer": {"learningRate": "fast"}}, "learningRate is refused: 'fast', must be a number of"),
    ({"spec.training.optimizer": {"learningRate": "-1"}}, "spec.training.optimizer.learningRate is refused: '-1'"),
    ({"spec.training.optimizer": {"learningRate": "inf"}}, "spec.training.optimizer.learningRate is refused: 'inf'"),
    ({"spec.training.optimizer": {"learningRate": "1e-3\n"}}, "spec.training.optimizer.learningRate is refused"),
    # the budget at the bucket
    (
        {"spec.data.originBudget": {"requestsPerSecond": 79, "bytesPerSecond": 1 << 30}, "spec.workers.replicas": 4},
        "requestsPerSecond 79 is too small for 4 pods with 2 processes each, which need 10; give at least 80",
    ),
    (
        {"spec.data.originBudget": {"requestsPerSecond": 80, "bytesPerSecond": 1 << 20}, "spec.workers.maxReplicas": 4},
        "1048576 is too small for 4 pods with 2 processes each, which need 1048576; give at least 8388608",
    ),
    (
        {"spec.data.originBudget": {"requestsPerSecond": 9, "bytesPerSecond": 1 << 30}},
        "requestsPerSecond is refused: 9",
    ),
    # the mixture
    ({"spec.data.sources": [ONE, ONE]}, "two sources are named 'one'; names are unique"),
    ({"spec.data.sources.0.weight": 0}, "spec.data.sources is refused: every weight is 0; give one source"),
    (
        {
            "spec.data.sources.0.weight": 0,
            "spec.data.schedule": [{"fromStep": 2, "weights": [{"source": "one", "weight": 1}]}],
        },
        "spec.data.sources is refused: every weight is 0; give one source a weight above 0",
    ),
    (
        {
            "spec.data.schedule": [
                {"fromStep": 5, "weights": [{"source": "one", "weight": 1}]},
                {"fromStep": 5, "weights": [{"source": "one", "weight": 2}]},
            ]
        },
        "spec.data.schedule is refused: fromStep must rise, seen [5, 5]; order the changes",
    ),
    (
        {"spec.data.schedule": [{"fromStep": 5, "weights": [{"source": "two", "weight": 1}]}]},
        "fromStep 5 weighs source 'two', sources are one; change weights[].source",
    ),
    (
        {"spec.data.schedule": [{"fromStep": 5, "weights": [{"source": "one", "weight": 1}] * 2}]},
        "fromStep 5 weighs 'one' twice; drop one",
    ),
    (
        {"spec.data.schedule": [{"fromStep": 5, "weights": [{"source": "one", "weight": 0}]}]},
        "every weight from step 5 on is 0; raise one",
    ),
    (
        {"spec.data.schedule": [{"fromStep": 1, "weights": [{"source": "one", "weight": 1}], "skipSteps": 3}]},
        "skipSteps 3 at fromStep 1 has no weights before it; drop it, or name a later step",
    ),
    (
        {
            "spec.data.sources": [{"name": f"s{at}", "dataset": "sample/one"} for at in range(17)],
            "spec.data.schedule": [
                {"fromStep": 5, "weights": [{"source": f"s{at}", "weight": 65_536 - at} for at in range(17)]}
            ],
        },
        "weights from step 5 on repeat only after 1113976 samples, expected at most 1048576; use smaller or rounder",
    ),
    ({"spec.data.temperature": "0.5"}, "spec.data.temperature is refused: '0.5', a number from 1 to 100"),
    ({"spec.data.temperature": "1e3"}, "spec.data.temperature is refused: '1e3', a number up to 100"),
    ({"spec.data.sources.0.epochsMax": 0}, "spec.data.sources.0.epochsMax is refused: 0"),
    *(
        (
            {**EARLY, f"spec.data.{field}": value},
            f"spec.data.startWhileProcessing is refused: {words} needs the size of every source, which is known when",
        )
        for field, value, words in (
            ("weightsBy", "Tokens", "weightsBy: Tokens"),
            ("temperature", "2", "temperature"),
            ("sources.0.epochsMax", 1, "epochsMax of source 'one'"),
        )
    ),
    # epochs
    ({"spec.training.epochs": 0}, "spec.training.epochs is refused: 0"),
    (
        {"spec.training": BY_EPOCHS, "spec.data.sources.0.epochsMax": 3},
        "training.epochs 3 cannot be combined with epochsMax of source 'one'; give training.steps, or drop epochsMax",
    ),
    (
        {"spec.training": BY_EPOCHS, **EARLY},
        "training.epochs 3 needs the size of every source, which is known when all",
    ),
    # augmentation
    (
        {"spec.data.augment": {"rotate": {"degrees": 5}}},
        "spec.data.augment.rotate",
    ),
    (
        {"spec.data.augment": {"crop": {"minAreaPercent": 101}}},
        "spec.data.augment.crop.minAreaPercent is refused: 101",
    ),
    (
        {"spec.data.sources.0.augment": {"scale": {"minPercent": 0}}},
        "spec.data.sources.0.augment.scale.minPercent is refused: 0",
    ),
    ({"spec.data.augment": {"mirror": {"probability": "1.5"}}}, "spec.data.augment.mirror.probability"),
    (
        {"spec.data.augment": {"mirror": {"probability": 0.5}}},
        'a decimal is written as text, in quotes: "0.5" (Kubernetes APIs carry no floats)',
    ),
    # evaluation
    (
        {"spec.evaluation": {"sets": [{"name": "a", "dataset": "held/a"}, {"name": "a", "dataset": "held/b"}]}},
        "spec.evaluation.sets is refused: two sets are named 'a'; names are unique",
    ),
    (
        {"spec.evaluation": {"sets": [{"name": "a", "dataset": "sample/one@3"}]}},
        "'a' evaluates on sample/one@3, source 'one' trains on it; choose a dataset that is held out",
    ),
    # workers, topology, layout
    (
        {"spec.workers": {"replicas": 2, "minReplicas": 3}},
        "replicas 2 is outside minReplicas..maxReplicas (3..15000)",
    ),
    ({"spec.workers": {"replicas": 3, "maxReplicas": 2}}, "replicas 3 is outside minReplicas..maxReplicas (1..2)"),
    (
        {"spec.topology": {"required": "rack", "preferred": "zone"}},
        "required and preferred cannot both be set; drop one",
    ),
    ({"spec.topology": {"sliceSize": 2}}, "sliceSize and sliceLevel must be set together; set both or none"),
    ({"spec.topology": {"sliceLevel": "rack"}}, "sliceSize and sliceLevel must be set together; set both or none"),
    ({"spec.parallelism": {"dp": 2}}, "mode Auto chooses the degrees itself, dp is set; use mode: Explicit or drop it"),
    ({"spec.parallelism": {"mode": "Explicit", "ep": 2}}, "mode Explicit needs dp; the other degrees default to 1"),
    (
        {"spec.parallelism": {"schedule": "1F1B"}},
        "mode Auto chooses the degrees itself, schedule is set; use mode: Explicit or drop it",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "schedule": "DualPipeV"}},
        "schedule DualPipeV needs pp of at least 2, seen 1; raise pp or drop schedule",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "GPipe"}},
        "spec.parallelism.schedule is refused: 'GPipe', must be '1F1B', 'Interleaved1F1B'",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 4, "microbatches": 3}},
        "schedule 1F1B over pp 4 needs at least 4 microbatches, seen 3; raise microbatches to 4 or more",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 4, "microbatches": 7, "schedule": "ZBVZeroBubble"}},
        "schedule ZBVZeroBubble over pp 4 needs at least 8 microbatches, seen 7; raise microbatches to 8 or more",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "microbatches": 7, "schedule": "Interleaved1F1B"}},
        "runs 7 microbatches in 3 equal rounds; set microbatches to 6 or 8",
    ),
    (
        {
            "spec.training.recompute": "Full",
            "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "DualPipeV"},
        },
        "training.recompute Full cannot be combined with parallelism.schedule DualPipeV",
    ),
    (
        {"spec.training.parameterSharding": "FSDP2", "spec.training.optimizer": {"name": "Muon"}},
        "parameterSharding FSDP2 cannot be combined with optimizer.name Muon, which needs whole matrices; use AdamW",
    ),
    (
        {"spec.training.parameterSharding": "FSDP2", "spec.training.optimizer": {"stateSharding": "Whole"}},
        "optimizer.stateSharding is Whole; leave stateSharding out, or use parameterSharding: None",
    ),
    (
        {
            "spec.training.parameterSharding": "FSDP2",
            "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2},
        },
        "FSDP2 cannot be combined with parallelism.pp 2: a pipeline keeps gathered parameters until its last",
    ),
    (
        {"spec.training.parameterSharding": "HSDP"},
        "'HSDP', rows within a node and copies on the others, is not available; use FSDP2, whose gathers of experts",
    ),
    (
        {"spec.training.parameterSharding": "FSDP2", "spec.training.adapters": adapters(8, "8")},
        "adapters cannot be combined with parameterSharding FSDP2",
    ),
    (
        {"spec.training.adapters": adapters(8, "8"), "spec.training.stages": [{"name": "all", "steps": 10}]},
        "stage all trains Tower, Projector, Decoder, with adapters only those of the decoder learn; write trains",
    ),
    ({"spec.export": {"adapters": "Alone"}}, "export.adapters is Alone, but the job trains no adapters"),
    ({"spec.training.adapters": adapters(8, "0")}, "alpha is 0, with which adapters add nothing"),
    ({"spec.training.adapters": adapters(8, "8", "Head")}, "targets.0"),
    ({"spec.training.capacityFactor": "0"}, "capacityFactor 0 is outside its range: above 0, at most 1000"),
    # failure rules
    ({"spec.failurePolicy": {"rules": [{"action": "Fail"}]}}, "a rule has either onExitCodes or onPodConditions"),
    (
        {"spec.failurePolicy": {"rules": [{"action": "Fail", "onExitCodes": RULE, "onPodConditions": DISRUPTED}]}},
        "a rule has either onExitCodes or onPodConditions; set exactly one",
    ),
]

UNPLANNABLE: list[tuple[dict[str, Any], str]] = [
    ({"spec.model.preset": "gpt"}, "unknown model preset: 'gpt', known presets are deepseek-v3, kimi-k2, kimi-vl-a3b"),
    ({"spec.model.overrides": {"decoder": {"layer": 1}}}, "unknown model size: 'layer', sizes of decoder are"),
    ({"spec.model.overrides": {"vision": {"heads": 3}}}, "vision.width: 64 is not a multiple of heads 3"),
    ({"spec.model.overrides": {"vision": {"heads": 0}}}, "vision.heads is 0, expected at least 1"),
    ({"spec.model.overrides": {"decoder": {"experts_per_token": 9}}}, "9 lies outside 1..experts (8)"),
    (
        {"spec.training.adapters": adapters(48, "8")},
        "adapters' rank is too large: 48, kv_a_proj_with_mqa of model kimi-vl-nano is 40 x 96; expected at most 40",
    ),
    (
        {"spec.training.adapters": adapters(4, "8")},
        "adapters' rank does not fit experts: 4, expected a multiple of 8, which grouped products need",
    ),
    (
        {
            "spec.model.overrides": {"decoder": {"dense_layers": 3}},
            "spec.training.adapters": adapters(8, "8", "Experts"),
        },
        "adapters have nothing to adapt: model kimi-vl-nano has no matrices of target Experts",
    ),
    ({"spec.data.tokenizer": {"vocabulary": 513}}, "513 tokens, the model embeds 512"),
    (
        {"spec.workers.replicas": 3},
        "3 workers x 1 devices = 3 ranks: packsPerStep 4 leaves ranks of dp 3 without a pack",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 4}},
        "dp 4 x pp 1 x cp 1 x tp 1 is 4 ranks, not 1; layouts of 1 ranks that fit: dp1",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 2, "ep": 4}, "spec.workers": {"replicas": 2}},
        "ep 4 does not divide dp x cp x tp (2)",
    ),
    (
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "tp": 3}, "spec.workers": {"replicas": 3}},
        "tp 3 does not divide the decoder's heads 4",
    ),
    (
        {
            "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "microbatches": 3},
            "spec.workers": {"replicas": 2},
        },
        "3 microbatches do not divide the 4 packs of a data-parallel rank; numbers that fit: 2, 4",
    ),
    (
        {
            "spec.parallelism": {"mode": "Explicit", "dp": 2, "pp": 2, "schedule": "DualPipeV"},
            "spec.workers": {"replicas": 4},
        },
        "schedule DualPipeV over pp 2 needs at least 4 of whole packs, a data-parallel rank has 2 packs per step",
    ),
    (
        {
            "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 4, "schedule": "ZBVZeroBubble"},
            "spec.workers": {"replicas": 4},
        },
        (
            "pipeline has too many stages: 8 for 3 layers, expected at least one layer on each between the first and "
            "the last"
        ),
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words[:60] for _, words in REFUSED])
def test_a_wrong_job_is_refused_with_the_field_and_the_rule(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_new_job(job_with(changes))
    assert words in str(refused.value)
    assert refused.value.exit_code == ExitCode.USAGE


def test_a_change_that_can_not_be_applied_does_not_make_a_job_that_exists_unreadable() -> None:
    """Nothing can take an appended entry away again, so what reads the job must be able to leave it out."""
    bad = {"fromStep": 5, "weights": [{"source": "two", "weight": 1}]}
    document = job_with({"spec.data.schedule": [bad]})
    with pytest.raises(InvalidConfigError, match="weighs source 'two'"):
        parse_new_job(document)
    spec = parse_job(document).spec
    assert list(schedule_faults(spec.data, spec.training)) == [5]
    assert mixture_changes(spec) == ()


@pytest.mark.parametrize(("changes", "words"), UNPLANNABLE, ids=[words[:60] for _, words in UNPLANNABLE])
def test_a_job_that_no_plan_fits_is_refused_when_it_is_loaded(changes: dict[str, Any], words: str) -> None:
    parse_job(job_with(changes))
    with pytest.raises(InvalidConfigError) as refused:
        load_job(job_with(changes))
    assert words in str(refused.value)
    assert "; change spec." in str(refused.value)


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_what_is_no_mapping_is_no_job(document: object) -> None:
    with pytest.raises(InvalidConfigError, match="not a TrainingJob"):
        parse_job(document)


def test_a_rule_across_fields_names_the_field_that_breaks_it() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_job(job_with({"spec.data.sources": [ONE, ONE]}))
    assert str(refused.value) == (
        "spec.data.sources is refused: two sources are named 'one'; names are unique; change spec.data.sources"
    )


def test_every_pattern_of_a_field_has_words() -> None:
    names = {info: kind.model_json_schema(by_alias=True) for info, kind in KINDS.items()}
    found = set(re.findall(r'"pattern": "((?:[^"\\\\]|\\\\.)*)"', json.dumps(names)))
    assert {json.loads(f'"{pattern}"') for pattern in found} - {QUANTITY_PATTERN} <= set(PATTERN_WORDS)


def test_several_mistakes_are_counted() -> None:
    with pytest.raises(InvalidConfigError, match=r"\(and 1 more\)"):
        parse_job(job_with({"spec.training.steps": 0, "spec.training.packsPerStep": 0}))


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_job(job_with({"spec.model.preset": "x" * 10_000}))
    assert len(str(refused.value)) < 300


def test_the_smallest_job_loads_with_its_defaults() -> None:
    job = load_job(SMALLEST)
    assert job.metadata.namespace == "default"
    assert job.spec.queue_name == "default"
    assert job.spec.parallelism.mode == "Auto"
    assert job.spec.health.heartbeat_timeout_seconds == 30
    assert job.spec.managed_by == "polyreme.dev/operator"


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.workers": {"replicas": 2, "minReplicas": 2, "maxReplicas": 2}},
        {"spec.topology": {"required": "rack", "sliceSize": 2, "sliceLevel": "host"}},
        {"spec.failurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": DISRUPTED}]}},
        {"spec.training.optimizer": {"learningRate": "2E-3", "clipNorm": "0"}},
        {
            "spec.data.sources.0.weight": 0,
            "spec.data.schedule": [{"fromStep": 1, "weights": [{"source": "one", "weight": 1}]}],
        },
        {"spec.evaluation": {"sets": [{"name": "a", "dataset": "held/out"}]}},
        {"metadata.labels": {"a": "b"}, "metadata.finalizers": ["x/y"]},
    ],
)
def test_a_job_at_the_edge_of_the_rules_loads_and_goes_round(changes: dict[str, Any]) -> None:
    job = load_job(job_with(changes))
    assert parse_job(job.to_object()) == job


def test_a_job_is_frozen() -> None:
    job = load_job(SMALLEST)
    with pytest.raises(ValueError, match="frozen"):
        job.spec.suspend = True  # type: ignore[misc]


def test_a_pod_template_is_kept_as_it_is() -> None:
    template = {"spec": {"containers": [{"name": "launcher", "env": [{"name": "A", "value": None}]}]}}
    job = load_job(job_with({"spec.workers.template": template}))
    assert job.to_object()["spec"]["workers"]["template"] == template


ANY_CONTAINER: dict[str, Any] = {
    "spec.model": DROP,
    "spec.data": DROP,
    "spec.training": DROP,
    "spec.workers": {"replicas": 6, "devices": 8, "runtime": {"mode": "Environment"}},
}


def test_a_container_that_brings_its_own_training_needs_no_model() -> None:
    job = load_job(job_with(ANY_CONTAINER))
    assert not {"model", "data", "training"} & set(job.to_object()["spec"])
    assert parse_job(job.to_object()) == job
    changed = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True})})
    assert not {"model", "data", "training"} & set(changed.to_object()["spec"])


def test_what_is_given_all_the_same_is_kept() -> None:
    job = load_job(job_with({"spec.workers.runtime": {"mode": "Environment"}, "spec.training": DROP}))
    assert job.to_object()["spec"]["model"]["preset"] == "kimi-vl-nano"
    assert "training" not in job.to_object()["spec"]


@pytest.mark.parametrize(
    ("parallelism", "layout"),
    [
        ({}, Layout(dp=48)),
        ({"mode": "Explicit", "dp": 3, "pp": 2, "tp": 8}, Layout(dp=3, pp=2, tp=8)),
        ({"mode": "Explicit", "dp": 6, "ep": 3, "cp": 8}, Layout(dp=6, ep=3, cp=8)),
    ],
)
def test_only_the_meshes_of_an_unknown_model_must_hold(parallelism: dict[str, Any], layout: Layout) -> None:
    plan = plan_for(load_job(job_with({**ANY_CONTAINER, "spec.parallelism": parallelism})).spec)
    assert plan.layout == layout
    assert {volume.axis: volume.ranks for volume in plan.volumes} == {
        axis: getattr(layout, axis) for axis in ("dp", "ep", "pp", "cp", "tp") if getattr(layout, axis) > 1
    }
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("parallelism", "words"),
    [
        ({"mode": "Explicit", "dp": 3}, "dp 3 x pp 1 x cp 1 x tp 1 is 3 ranks, not 48; change spec.parallelism"),
        ({"mode": "Explicit", "dp": 6, "tp": 8, "ep": 5}, "ep 5 does not divide dp x cp x tp (48)"),
    ],
)
def test_meshes_that_do_not_hold_are_refused(parallelism: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load_job(job_with({**ANY_CONTAINER, "spec.parallelism": parallelism}))
    assert words in str(refused.value)


def test_another_worker_count_scales_only_the_data_groups_of_an_unknown_model() -> None:
    spec = load_job(
        job_with({**ANY_CONTAINER, "spec.parallelism": {"mode": "Explicit", "dp": 3, "pp": 2, "tp": 8}})
    ).spec
    assert plan_for(spec, replicas=4).layout == Layout(dp=2, pp=2, tp=8)
    with pytest.raises(InvalidConfigError, match="is 48 ranks, not 56"):
        plan_for(spec, replicas=7)
