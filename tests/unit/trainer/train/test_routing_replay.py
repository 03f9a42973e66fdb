"""Choices of experts: recorded where answers are drawn, kept in the step's record, and replayed in training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from polyreme_api.job.objective import Objective
from polyreme_datahub.objects import open_store
from polyreme_planner.latent_cache import CacheKind
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.moe import Router
from polyreme_trainer.model.section import Section
from polyreme_trainer.model.stage import decode
from polyreme_trainer.serve.choices import Choices
from polyreme_trainer.serve.scheduler import Piece, Sequence
from polyreme_trainer.train import online_reference
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.rollouts.generation import Drawing, generate
from polyreme_trainer.train.rollouts.record import Answers, RolloutLog
from polyreme_trainer.train.rollouts.streams import prompts_of, shares_of, with_answers
from tests.unit.trainer.model.conftest import loud_model
from tests.unit.trainer.train.pairs import MEDIA, PAD
from tests.unit.trainer.train.test_group_relative import END, PACK_TOKENS, documents, text_only

LAYERS, CHOSEN = 2, 2
OBJECTIVE = Objective.model_validate(
    {
        "kind": "GroupRelative",
        "reward": "a:b",
        "samples": 3,
        "answerTokens": 5,
        "temperature": "1.5",
        "generation": {"replayRouting": True},
    }
)


@pytest.fixture(scope="module")
def rolled() -> tuple[Inputs, Answers]:
    """Answers that a model has drawn, kept, read again and laid out for training; the first one is cut."""
    model = loud_model().eval()
    batch = text_only(documents())
    prompts = prompts_of(batch, media=MEDIA, end=END, merge=2)
    drawing = Drawing(models=[model], pipeline=None, agree=int, share=(0, 1))
    made = generate(drawing, prompts, OBJECTIVE, cache=CacheKind.AUTO, stop_token=END, seed=4, step=1)
    answers = {
        prompt.key: [dataclasses.replace(one, ended=number > 0) for number, one in enumerate(of)]
        for prompt, of in zip(prompts, made, strict=True)
    }
    shares = shares_of(answers, OBJECTIVE, step=1)
    stream, drawn = with_answers(batch, prompts, answers, shares, objective=OBJECTIVE, pack_tokens=PACK_TOKENS, pad=PAD)
    return to_inputs(stream, device="cpu", media_token=MEDIA, drawn=drawn), answers


def plain(inputs: Inputs) -> Inputs:
    """The same, where routers choose."""
    return dataclasses.replace(inputs, chosen_LSX=None)


def real(of: Tensor, inputs: Inputs) -> Tensor:
    """The choices of rows that are not padding, each token's in order."""
    assert inputs.real_N is not None
    return of.index_select(0, inputs.real_N).sort(-1).values


def perturbed(model: Any) -> Any:
    """Routers that prefer other experts, as a trained or rounded one may."""
    with torch.no_grad():
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.e_score_correction_bias.copy_(router.e_score_correction_bias.flip(0) * 9)
    return model


def test_choices_of_generation_are_those_of_training(rolled: tuple[Inputs, Answers]) -> None:
    inputs, _ = rolled
    assert inputs.chosen_LSX is not None
    assert inputs.chosen_LSX.shape[0] == LAYERS
    free = decode(loud_model().eval(), None, plain(inputs))
    for chosen_SX, expected_SX in zip(inputs.chosen_LSX, free.experts, strict=True):
        torch.testing.assert_close(real(chosen_SX, inputs), real(expected_SX, inputs))


def test_replay_keeps_the_experts_of_a_router_that_has_changed(rolled: tuple[Inputs, Answers]) -> None:
    inputs, _ = rolled
    assert inputs.chosen_LSX is not None
    model = perturbed(loud_model())
    free, replayed = decode(model, None, plain(inputs)), decode(model, None, inputs)
    for layer, chosen_SX in enumerate(inputs.chosen_LSX):
        assert (real(free.experts[layer], inputs) != real(chosen_SX, inputs)).any(), "the planted change does nothing"
        torch.testing.assert_close(real(replayed.experts[layer], inputs), real(chosen_SX, inputs))
        load_E = torch.bincount(real(chosen_SX, inputs).flatten(), minlength=model.shape.decoder.experts)
        torch.testing.assert_close(replayed.routing.load_LE[layer], load_E)
    head = model.language_model.lm_head
    logp_N = head(replayed.hidden_TD, inputs.targets_T, inputs.learned_N, scores=True)
    assert torch.isfinite(logp_N).all()
    # Which experts is replayed, how much each counts is not: the router learns.
    loss = head(replayed.hidden_TD, inputs.targets_T, inputs.learned_N)
    gates = [module.weight for module in model.modules() if isinstance(module, Router)]
    assert all(float(gradient.abs().max()) > 0 for gradient in torch.autograd.grad(loss, gates))


def test_a_record_keeps_a_byte_a_choice(rolled: tuple[Inputs, Answers], tmp_path: Path) -> None:
    _, answers = rolled
    log = RolloutLog(open_store(tmp_path.as_uri()), attempt=1)
    kept = log.commit("rollouts/step-000000001-ab.json", 1, answers)
    for key, of in answers.items():
        for one, other in zip(of, kept[key], strict=True):
            for name, tokens in (("chosen", len(one.tokens) - 1), ("prompt_chosen", None)):
                mine, stored = getattr(one, name), getattr(other, name)
                np.testing.assert_array_equal(mine, stored)
                assert stored.nbytes == stored.shape[0] * LAYERS * CHOSEN
                assert tokens is None or stored.shape[0] == tokens
    (path,) = (tmp_path / "rollouts").iterdir()
    prompts = json.loads(path.read_text())["prompts"]
    assert sum("experts" in of for of in prompts.values()) == len(answers), "a prompt's choices are kept once"


def test_a_reference_chooses_for_itself(rolled: tuple[Inputs, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = rolled
    seen: list[Inputs] = []

    def scores(_state: Any, microbatch: Inputs, _meshes: Any) -> None:
        seen.append(microbatch)

    monkeypatch.setattr(online_reference, "token_log_probs", scores)
    state: Any = types.SimpleNamespace(
        reference=types.SimpleNamespace(in_place=contextlib.nullcontext),
        zero1=None,
        optimizer=types.SimpleNamespace(settle=lambda: None),
        models={},
    )
    (learned,) = online_reference.compared(state, [inputs], cast("Any", None))
    assert seen[0].chosen_LSX is None
    assert learned.chosen_LSX is inputs.chosen_LSX


def test_more_than_256_experts_take_two_bytes() -> None:
    shape = dataclasses.replace(KIMI_VL_NANO.decoder, experts=512)
    choices, layers = Choices(shape), range(shape.layers)
    piece = Piece(Sequence(number=0, prompt=2, new_tokens_max=1, stop_token=0, like=0), 0, 2)
    choices.keep([piece], Section(layers=layers), [torch.full((2, CHOSEN), 300)] * LAYERS)
    taken = choices.take(0, 2)
    assert taken.element_size() == 2
    assert taken.unique().tolist() == [300]
