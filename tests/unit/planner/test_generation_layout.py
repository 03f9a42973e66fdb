"""A layout in which answers are drawn: refused where it does not fit, and its copy of the weights is planned."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec
from polyreme_planner.plan import plan_for
from polyreme_planner.plan_inputs import setting_of
from polyreme_planner.refusals import memory_of_cut
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import outline
from tests.unit.api.jobs import job_with

ADAPTERS = {"rank": 4, "alpha": "8", "targets": ["Attention"]}


def spec_of(*degrees: int | None, memory: str = "1Gi", **more: Any) -> TrainingJobSpec:
    """A job of 4 ranks with one rewarded stage for each degree; None draws in training's layout."""
    objective = {"kind": "GroupRelative", "reward": "a:b", "samples": 2, "answerTokens": 8}
    stages = [
        {
            "name": f"s{number}",
            "steps": 2,
            "trains": ["Decoder"],
            "objective": objective | ({} if ep is None else {"generation": {"parallelism": {"ep": ep}}}),
        }
        for number, ep in enumerate(degrees)
    ]
    training = {"steps": 2 * len(stages), "stages": stages, **more}
    changes = {f"spec.training.{name}": value for name, value in training.items()}
    limits = {"containers": [{"name": "worker", "resources": {"limits": {"memory": memory}}}]}
    fixed = {
        "spec.workers.replicas": 4,
        "spec.workers.template.spec": limits,
        "spec.parallelism": {"mode": "Explicit", "dp": 2, "pp": 2},
    }
    return TrainingJobSpec.model_validate(job_with({**fixed, **changes})["spec"])


@pytest.mark.parametrize(
    ("spec", "words", "field"),
    [
        (spec_of(3), "ep 3 does not divide the job's 4 ranks", "stages[0].objective.generation.parallelism.ep"),
        (spec_of(None, 16), "ep 16 does not divide the job's 4 ranks", "stages[1].objective"),
        (spec_of(1, 2), "stages draw answers in 2 layouts: ep 1 and ep 2; name the same in all", "stages[0]"),
        (spec_of(1, adapters=ADAPTERS), "cannot be combined with adapters", "stages[0].objective.generation"),
    ],
)
def test_what_does_not_fit_is_refused(spec: TrainingJobSpec, words: str, field: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        plan_for(spec)
    assert words in str(refused.value)
    assert field in (refused.value.field or "")


def test_a_second_copy_of_the_weights_is_planned() -> None:
    """All layers on each rank, whatever training's layout is, and a share of the experts."""

    def bytes_of(ep: int | None) -> tuple[int, int, int]:
        spec = spec_of(ep)
        plan = plan_for(spec)
        memory = memory_of_cut(setting_of(spec, plan.shape), plan.layout, plan.cut, packs_per_step=4)
        return memory.total_bytes, memory.start_bytes, memory.generation_bytes

    without, own, shared = bytes_of(None), bytes_of(1), bytes_of(4)
    tensors = outline(KIMI_VL_NANO)
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name and "shared" not in name)
    biases = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("correction_bias"))
    every = sum(tensor.numel() for tensor in tensors.values()) - biases
    for found, expected in ((without, 0), (own, 4 * every), (shared, 4 * (every - experts * 3 // 4))):
        assert found[2] == expected
        assert [found[at] - without[at] for at in (0, 1)] == [expected, expected]


def test_a_copy_that_does_not_fit_is_refused() -> None:
    plan_for(spec_of(None, memory="11Mi"))
    with pytest.raises(InvalidConfigError, match=r"generation \d"):
        plan_for(spec_of(1, memory="11Mi"))
