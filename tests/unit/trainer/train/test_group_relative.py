"""Answers that the model has drawn learn by the textbook's loss, and as documents of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyreme_api.batch import IGNORED_TARGET
from polyreme_api.errors import InvalidConfigError, StepFailedError
from polyreme_api.job.objective import Objective
from polyreme_trainer.model.branches import Branches, Drawn
from polyreme_trainer.model.stage import Stage, decode
from polyreme_trainer.serve.engine import Made
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.objectives.kinds import objective_of
from polyreme_trainer.train.objectives.objective import Weigher
from polyreme_trainer.train.rollouts.generation import answer_of
from polyreme_trainer.train.rollouts.record import NO_TEXT, Answer, Answers
from polyreme_trainer.train.rollouts.streams import DocumentPrompt, prompts_of, shares_of, with_answers
from tests.unit.trainer.model.conftest import loud_model
from tests.unit.trainer.train.pairs import MEDIA, PAD, packed, some_pairs

END, SAMPLES, PACK_TOKENS = 499, 4, 256
PAIRS = some_pairs(3)
"""The chosen answer is what the data expect."""
DRAW = np.random.default_rng(5)


def objective(**fields: str) -> Objective:
    return Objective.model_validate({"kind": "GroupRelative", "reward": "a:b", "samples": SAMPLES, **fields})


def documents() -> Any:
    """One document a prompt, with the expected answer, in one pack."""
    whole = packed(PAIRS, shared=False, tokens_max=PACK_TOKENS)
    targets = np.array(whole.targets_T)
    offsets = np.asarray(whole.document_offsets)
    for document in range(1, 2 * len(PAIRS), 2):  # the rejected answers are not learned, so not asked for
        targets[offsets[document] : offsets[document + 1]] = IGNORED_TARGET
    return dataclasses.replace(
        whole, targets_T=targets, padding_documents=(*range(1, 2 * len(PAIRS), 2), *whole.padding_documents)
    )


def drawn_answers(prompts: list[DocumentPrompt]) -> Answers:
    """Some of every length; the last one of each prompt is cut."""

    def one(number: int) -> Answer:
        tokens = tuple(int(token) for token in DRAW.integers(2, 498, int(DRAW.integers(1, 6))))
        return Answer(
            tokens=(*tokens, END),
            log_probs=tuple(DRAW.normal(-6, 0.5, len(tokens) + 1).tolist()),
            ended=number < SAMPLES - 1,
            rewarded=dataclasses.replace(NO_TEXT, reward=float(DRAW.integers(0, 3))),
        )

    return {prompt.key: [one(number) for number in range(SAMPLES)] for prompt in prompts}


def text_only(batch: Any) -> Any:
    """Without the images of documents that are padding."""
    return dataclasses.replace(
        batch, patches_PC=np.asarray(batch.patches_PC).reshape(len(PAIRS) * 2, 8, -1)[::2].reshape(8 * len(PAIRS), -1),
        grids_I2=np.asarray(batch.grids_I2)[::2],
    )  # fmt: skip


def rolled_out(of: Objective) -> tuple[Inputs, list[DocumentPrompt], Answers]:
    batch = text_only(documents())
    prompts = prompts_of(batch, media=MEDIA, end=END, merge=2)
    answers = drawn_answers(prompts)
    shares = shares_of(answers, of, step=1)
    stream, drawn = with_answers(batch, prompts, answers, shares, objective=of, pack_tokens=PACK_TOKENS, pad=PAD)
    inputs = to_inputs(stream, device="cpu", media_token=MEDIA, drawn=drawn)
    return inputs, prompts, answers


def log_probs(model: Any, prompt: DocumentPrompt, answer: Answer) -> Tensor:
    """Of an answer's tokens after its prompt, in a document of its own, by torch's own functions."""
    tokens = [*prompt.prompt_tokens, *answer.tokens]
    targets = np.full(len(tokens), IGNORED_TARGET)
    targets[len(prompt.prompt_tokens) - 1 : -1] = answer.tokens
    batch = dataclasses.replace(
        documents(), tokens_T=np.array(tokens), targets_T=targets, positions_T=np.arange(len(tokens)),
        document_offsets=np.array([0, len(tokens)], np.int32), patches_PC=prompt.patches_PC, grids_I2=prompt.grids_I2,
        padding_documents=(),
    )  # fmt: skip
    inputs = to_inputs(batch, device="cpu", media_token=MEDIA)
    logits_TV = decode(model, None, inputs).hidden_TD @ model.language_model.lm_head.weight.T
    learned = inputs.targets_T != IGNORED_TARGET
    return -torch.nn.functional.cross_entropy(logits_TV[learned], inputs.targets_T[learned], reduction="none")


def textbook(model: Any, prompts: list[DocumentPrompt], answers: Answers, of: Objective) -> Tensor:
    """The mean loss, by autograd, as its papers write it."""
    losses: list[Tensor] = []
    for prompt in prompts:
        rewards = torch.tensor([answer.reward for answer in answers[prompt.key]], dtype=torch.float64)
        advantage_G = rewards - rewards.mean()
        if of.advantage == "MeanAndDeviation":
            advantage_G = advantage_G / (rewards.std() + 1e-4)
        for answer, advantage in zip(answers[prompt.key], advantage_G, strict=True):
            if not answer.ended:
                continue
            logp_A = log_probs(model, prompt, answer).double()
            moved_A = logp_A.detach() - torch.tensor(answer.log_probs, dtype=torch.float64)
            ratio_A = (logp_A - logp_A.detach()).exp()
            weight_A = {
                "None": torch.ones_like(moved_A),
                "Token": moved_A.exp().clamp(max=float(of.correction_limit)),
                "Sequence": moved_A.sum().exp().clamp(max=float(of.correction_limit)).expand_as(moved_A),
            }[of.correction]
            clipped_A = ratio_A.clamp(0.8, 1.2)
            losses.append(-torch.minimum(ratio_A * advantage, clipped_A * advantage) * weight_A)
    if of.aggregation == "Tokens":
        return torch.cat(losses).mean()
    return torch.stack([each.mean() for each in losses]).mean()


@pytest.mark.parametrize(
    "fields",
    [
        {"correctionLimit": "1.5"},
        {"aggregation": "Sequences", "correction": "Sequence"},
        {"advantage": "MeanAndDeviation", "correction": "None"},
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_textbooks(fields: dict[str, str]) -> None:
    of, model = objective(**fields), loud_model()
    inputs, prompts, answers = rolled_out(of)
    assert [list(prompt.prompt_tokens) for prompt in prompts] == [pair.prompt for pair in PAIRS]
    assert [list(prompt.expected) for prompt in prompts] == [pair.chosen for pair in PAIRS]
    kind = objective_of(of)
    assert kind is not None
    assert inputs.branches is not None
    stage, weigher = Stage(model), Weigher(kind)
    stage.weigh = weigher.weigh
    ours = stage(microbatch=inputs) / kind.counted(inputs.branches)
    theirs = textbook(model, prompts, answers, of)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    both = zip(*(torch.autograd.grad(loss, wanted, retain_graph=True) for loss in (ours, theirs)), strict=True)
    for one, other in both:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()) + 1e-7)


def test_a_distance_to_the_reference_has_the_gradient_of_the_divergence() -> None:
    """Over all tokens that can be drawn, each as often as it is drawn, and without a reward."""
    draw = torch.Generator().manual_seed(2)
    logits_V, other_V = torch.randn(2, 7, dtype=torch.float64, generator=draw)
    logits_V.requires_grad_()
    logp_V, ref_V = logits_V.log_softmax(0), other_V.log_softmax(0)
    (exact_V,) = torch.autograd.grad((logp_V.exp() * (logp_V - ref_V)).sum(), logits_V, retain_graph=True)
    drawn = Drawn(
        log_prob_N=logp_V.detach(),
        advantage_B=torch.zeros(7, dtype=torch.float64),
        share_B=logp_V.detach().exp(),
        reference_N=ref_V,
    )
    one_B = torch.ones(7, dtype=torch.float64)
    branches = Branches(branch_N=torch.arange(7), tokens_B=one_B, reference_B=one_B * 0, drawn=drawn)
    kind = objective_of(objective(kl="0.5"))
    assert kind is not None
    loss, weights_V, measured_M = kind.weigh(logp_V.detach(), branches)
    (ours_V,) = torch.autograd.grad(-(weights_V.double() * logp_V).sum(), logits_V)
    torch.testing.assert_close(ours_V, exact_V / 2, rtol=1e-5, atol=1e-7)
    expected = (logp_V.exp() * (logp_V - ref_V).square()).sum().detach() / 4
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(measured_M[0]) == 0.0


def test_a_temperature_divides_the_logits_of_training_too() -> None:
    of, model = objective(temperature="2"), loud_model()
    inputs, prompts, answers = rolled_out(of)
    kind = objective_of(of)
    assert kind is not None
    seen: list[Tensor] = []
    stage, weigher = Stage(model), Weigher(kind)
    stage.temperature = kind.temperature

    def weigh(branches: Any) -> Any:
        def taken(logp_N: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(logp_N.clone())
            return weigher.weigh(branches)(logp_N)

        return taken

    stage.weigh = weigh
    stage(microbatch=inputs)
    with torch.no_grad():
        model.language_model.lm_head.weight.div_(2)
        expected = [
            log_probs(model, prompt, answer) for prompt in prompts for answer in answers[prompt.key] if answer.ended
        ]
    torch.testing.assert_close(seen[0], torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_an_answer_that_names_an_image_is_not_learned() -> None:
    """The stream would have a media token without an image."""

    def said(*tokens: int) -> Answer:
        made = [Made(request=0, token=token, log_prob=-1.0, ended=False) for token in tokens]
        return answer_of(made, stop=END, media=MEDIA)

    assert said(3, END).ended
    assert not said(3, MEDIA, END).ended
    assert not said(3, 4).ended


def test_answers_that_were_all_cut_are_no_step() -> None:
    cut = {"a": [Answer(tokens=(3,), log_probs=(-1.0,), ended=False)] * 2}
    with pytest.raises(StepFailedError, match="step 7 has nothing to learn from: all of its answers were cut at 64"):
        shares_of(cut, objective(), step=7)


def test_answers_that_do_not_fit_are_refused() -> None:
    of = objective()
    batch = text_only(documents())
    prompts = prompts_of(batch, media=MEDIA, end=END, merge=2)
    long = Answer(tokens=(3,) * 90, log_probs=(-1.0,) * 90, ended=True)
    answers = {prompt.key: [long] * SAMPLES for prompt in prompts}
    shares = shares_of(answers, of, step=1)
    with pytest.raises(InvalidConfigError, match="answers do not fit their pack"):
        with_answers(batch, prompts, answers, shares, objective=of, pack_tokens=PACK_TOKENS, pad=PAD)


def test_an_image_after_the_answer_is_refused() -> None:
    batch = text_only(documents())
    tokens = np.array(batch.tokens_T)
    first = len(PAIRS[0].prompt)
    tokens[first : first + 1] = MEDIA
    with pytest.raises(InvalidConfigError, match="an image is in or after the last answer"):
        prompts_of(dataclasses.replace(batch, tokens_T=tokens), media=MEDIA, end=END, merge=2)
