"""Two answers that share their prompt learn as two documents would, and by the textbook's loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyreme_api.job.objective import Objective
from polyreme_trainer.model import loss
from polyreme_trainer.model.stage import Stage, decode
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.objectives.kinds import objective_of
from polyreme_trainer.train.objectives.objective import Weigher
from tests.unit.trainer.model.conftest import loud_model
from tests.unit.trainer.train.pairs import packed, some_pairs

PAIRS = some_pairs(6)
DRAW = np.random.default_rng(1)
REFERENCE = np.round(DRAW.normal(-40, 5, size=(len(PAIRS), 2)), 3)
"""Scores of the chosen and of the rejected answers."""


def kind(**fields: str) -> Any:
    found = objective_of(Objective.model_validate({"kind": "Preference", **fields}))
    assert found is not None
    return found


def shared_inputs(reference: Any = None) -> Inputs:
    batch = packed(PAIRS, shared=True, tokens_max=200)
    return to_inputs(batch, device="cpu", media_token=1, reference=reference)


def scores_of(model: Any, inputs: Inputs) -> Tensor:
    """Log-probabilities of the unmasked targets, with gradient, by torch's own functions."""
    hidden_TD = decode(model, None, inputs).hidden_TD
    logits_TV = hidden_TD @ model.language_model.lm_head.weight.T
    learned = inputs.targets_T != -100
    return -torch.nn.functional.cross_entropy(logits_TV[learned], inputs.targets_T[learned], reduction="none")


def answers_of(model: Any) -> tuple[Tensor, Tensor]:
    """Scores and tokens of the answers, each a document of its own with its prompt before it (P, 2)."""
    inputs = to_inputs(packed(PAIRS, shared=False), device="cpu", media_token=1)
    assert inputs.attend is None, "plain documents"
    lengths = [len(answer) for pair in PAIRS for answer in (pair.chosen, pair.rejected)]
    scores = torch.stack([part.double().sum() for part in scores_of(model, inputs).split(lengths)])
    return scores.view(-1, 2), torch.tensor(lengths).view(-1, 2)


def gradients(model: Any, total: Tensor) -> list[Tensor]:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(total, wanted))


@pytest.mark.parametrize("dense", [True, False])
def test_answers_that_share_a_prompt_score_as_documents_of_their_own(
    dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dense:
        monkeypatch.setattr("polyreme_trainer.model.attention_tiles.DENSE_TOKENS_MAX", 0)
    model, inputs = loud_model(), shared_inputs()
    assert inputs.branches is not None
    alone_P2, _ = answers_of(model)
    shared_N = scores_of(model, inputs)
    shared_B = torch.zeros(2 * len(PAIRS), dtype=torch.float64).index_add(
        0, inputs.branches.branch_N, shared_N.double()
    )
    torch.testing.assert_close(shared_B, alone_P2.flatten(), rtol=0, atol=1e-4)
    per_token_B = (shared_B - alone_P2.flatten()).abs() / inputs.branches.tokens_B
    assert per_token_B.max() <= 1e-5
    weights = torch.randn(2 * len(PAIRS), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = gradients(model, (shared_B * weights).sum())
    theirs = gradients(model, (alone_P2.flatten() * weights).sum())
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


def textbook(objective: Objective, scores_P2: Tensor, tokens_P2: Tensor) -> Tensor:
    """The mean loss of pairs as the papers have it."""
    beta, eps = float(objective.beta), float(objective.label_smoothing)
    moved = scores_P2 - torch.from_numpy(REFERENCE)
    if objective.loss != "Sigmoid":
        moved = moved / tokens_P2
    margin = moved[:, 0] - moved[:, 1]
    if objective.loss == "IPO":
        of_pair = (margin - 1 / (2 * beta)) ** 2
    else:
        of_pair = -(1 - eps) * torch.log(torch.sigmoid(beta * margin)) - eps * torch.log(torch.sigmoid(-beta * margin))
    own = -float(objective.supervised_weight) * scores_P2[:, 0] / tokens_P2[:, 0]
    return (of_pair + own).mean()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"loss": "SigmoidNorm", "beta": "2"},
        {"loss": "IPO"},
        {"labelSmoothing": "0.2", "supervisedWeight": "0.5"},
    ],
    ids=str,
)
@pytest.mark.parametrize("logits_max", [1 << 28, 5 * 2048])
def test_loss_and_gradient_are_the_textbooks(
    fields: dict[str, str], logits_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "LOGITS_MAX", logits_max)
    objective, model = Objective.model_validate({"kind": "Preference", **fields}), loud_model()
    inputs = shared_inputs(lambda samples_B2: REFERENCE[samples_B2[:, 1], np.arange(len(samples_B2)) % 2])
    stage, weigher = Stage(model), Weigher(kind(**fields))
    stage.weigh = weigher.weigh
    total = stage(microbatch=inputs)
    expected = textbook(objective, *answers_of(model)) * len(PAIRS)
    torch.testing.assert_close(total, expected.float(), rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(model, total), gradients(model, expected)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-4 * max(1e-2, float(other.abs().max()))


def test_a_model_that_is_its_reference_has_no_margin_and_the_loss_log_2() -> None:
    model = loud_model()
    stage = Stage(model)
    first = shared_inputs()
    assert first.branches is not None
    hidden_SD = decode(model, None, first).hidden_TD
    logp_N = model.language_model.lm_head(hidden_SD, first.targets_T, first.learned_N, scores=True)
    scores = first.branches.scores(logp_N).numpy()
    weigher = Weigher(kind())
    stage.weigh = weigher.weigh
    total = stage(microbatch=shared_inputs(lambda _: scores))
    measured_M = weigher.take()
    assert measured_M is not None
    measured = dict(zip(weigher.objective.metrics, measured_M.tolist(), strict=True))
    assert total.item() == np.float32(len(PAIRS) * math.log(2))
    assert measured["rewardMargin"] == measured["referenceDrift"] == measured["pairAccuracy"] == 0.0


def test_a_stream_without_pairs_has_nothing_to_learn() -> None:
    """A null pack, in a stage of preferences."""
    model = loud_model()
    stage, weigher = Stage(model), Weigher(kind())
    stage.weigh = weigher.weigh
    inputs = shared_inputs()
    nothing = dataclasses.replace(
        inputs, targets_T=torch.full_like(inputs.targets_T, -100), learned_N=None, branches=None
    )
    total = stage(microbatch=nothing)
    total.backward()
    assert total.item() == 0.0
    assert weigher.take() is None
