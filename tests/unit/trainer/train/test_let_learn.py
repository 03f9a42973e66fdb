"""Frozen parts get no gradient, the others get their usual one, and positions follow the curriculum stage."""

from __future__ import annotations

import pytest
import torch

from polyreme_planner.costs import Recompute
from polyreme_planner.curriculum import EVERYTHING, CurriculumStage, Learner
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.stage import Stage
from polyreme_trainer.parallel.flat_buffers import flatten
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.optimizer import learner_of
from polyreme_trainer.train.state import let_learn
from tests.parallel.pages import MEDIA, Pages

Gradients = dict[str, torch.Tensor]


def gradients(stage: Stage, *stages: CurriculumStage) -> list[Gradients]:
    """Gradients of one batch in each curriculum stage, one after another on one model."""
    flat = flatten(dict(stage.model.named_parameters()), piggybacked=0)
    inputs = to_inputs(Pages(packs=2).packs(1, first=0, count=2), device="cpu")
    found = []
    for trained in stages:
        let_learn(stage.model, trained)
        flat.clear_gradients()
        stage(microbatch=inputs).backward()
        found.append({name: view.clone() for part in flat.parts for name, view in part.views(part.gradients)})
    return found


def alone(*learners: Learner) -> CurriculumStage:
    return CurriculumStage(steps=1, learners=frozenset(learners))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", list(Recompute))
def test_only_what_learns_has_a_gradient_and_it_is_the_usual_one(recompute: Recompute) -> None:
    model = build_model(KIMI_VL_NANO, seed=0, media_token=MEDIA, options=ComputeOptions(recompute=recompute))
    usual = CurriculumStage(steps=1)
    stages = [alone(Learner.TOWER, Learner.PROJECTOR), alone(Learner.DECODER), alone(Learner.PROJECTOR), usual]
    whole, *seen = gradients(Stage(model), usual, *stages)
    assert all(bool(gradient.any()) for gradient in whole.values())
    for stage, made in zip(stages, seen, strict=True):
        for name, gradient in made.items():
            if learner_of(name) in stage.learners:
                assert torch.equal(gradient, whole[name]), name
            else:
                assert not gradient.any(), name
    assert {learner_of(name) for name in whole} == EVERYTHING


def test_positions_are_turned_by_the_theta_of_the_stage_and_then_by_the_models_again() -> None:
    model = build_model(KIMI_VL_NANO, seed=0, media_token=MEDIA)
    far = CurriculumStage(steps=1, rope_theta=800_000.0)
    name = "language_model.model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    before, there, again = gradients(Stage(model), CurriculumStage(steps=1), far, CurriculumStage(steps=1))
    assert not torch.allclose(there[name], before[name], rtol=1e-3)
    assert torch.equal(again[name], before[name])
