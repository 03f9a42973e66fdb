"""Decoding with a cache gives the same answers as decoding without one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from polyreme_api.batch import Array
from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.model.generate import generate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from polyreme_trainer.model.patch_grid import Grid
    from polyreme_trainer.model.vlm import KimiVL
    from tests.unit.trainer.model.conftest import Batch


@dataclasses.dataclass(frozen=True)
class Question:
    prompt_tokens: Sequence[int]
    patches_PC: Array
    grids_I2: Array


@pytest.fixture
def questions(batch_of: Callable[..., Batch]) -> list[Question]:
    asked: list[tuple[int, list[Grid]]] = [(12, [(2, 4)]), (5, []), (17, [(4, 4), (2, 2)]), (1, []), (8, [(2, 2)])]
    made = []
    for seed, (length, grids) in enumerate(asked):
        batch = batch_of([length], [grids], seed=seed)
        grids_I2 = np.array(batch.grids, dtype=np.int32).reshape(-1, 2)
        made.append(Question(batch.tokens_T.tolist(), batch.patches_PC.numpy(), grids_I2))
    return made


def naive(model: KimiVL, question: Question, stop_token: int, new_tokens_max: int) -> list[int]:
    tokens = list(question.prompt_tokens)
    answer: list[int] = []
    patches_PC = torch.from_numpy(np.asarray(question.patches_PC))
    grids = [(int(rows), int(columns)) for rows, columns in np.asarray(question.grids_I2)]
    while len(answer) < new_tokens_max and stop_token not in answer:
        with torch.no_grad():
            tokens_T = torch.tensor(tokens)
            hidden_TD = model(tokens_T, torch.arange(len(tokens)), [0, len(tokens)], patches_PC, grids).hidden_TD
            answer.append(int(model.logits(hidden_TD[-1:]).argmax()))
        tokens.append(answer[-1])
    return answer


@pytest.mark.parametrize("prompts_at_once", [256, 2])
def test_cached_decoding_equals_a_naive_loop(model: KimiVL, questions: list[Question], prompts_at_once: int) -> None:
    never = model.shape.decoder.vocabulary
    expected = [naive(model, question, never, 6) for question in questions]
    assert len({tuple(answer) for answer in expected}) == len(questions)
    assert generate(model, questions, stop_token=never, new_tokens_max=6, prompts_at_once=prompts_at_once) == expected


def test_an_answer_ends_with_the_stop_token_and_the_others_go_on(model: KimiVL, questions: list[Question]) -> None:
    free = generate(model, questions, stop_token=-1, new_tokens_max=6)
    stop_token = free[2][3]
    expected = [naive(model, question, stop_token, 6) for question in questions]
    answers = generate(model, questions, stop_token=stop_token, new_tokens_max=6)
    assert answers == expected
    assert len(answers[2]) <= 4
    assert answers[2][-1] == stop_token
    assert max(map(len, answers)) == 6


def test_a_media_token_that_the_model_says_itself_needs_no_image(model: KimiVL, questions: list[Question]) -> None:
    model.language_model.lm_head.weight.data.zero_()  # all tokens are equally likely, the first index wins
    model.media_token = 0
    assert generate(model, questions[1:2], stop_token=-1, new_tokens_max=3) == [[0, 0, 0]]


def test_a_rank_that_is_done_goes_on_until_all_are(model: KimiVL, questions: list[Question]) -> None:
    first = generate(model, questions[:1], stop_token=-1, new_tokens_max=1)[0][0]
    asked: list[bool] = []

    def others_are_not(done: bool) -> bool:
        asked.append(done)
        return False

    answers = generate(model, questions[:1], stop_token=first, new_tokens_max=4, agree=others_are_not)
    assert answers == [[first]]
    assert asked == [True, True, True]


def test_a_rank_without_prompts_takes_part(model: KimiVL) -> None:
    asked: list[bool] = []
    assert generate(model, [], stop_token=0, new_tokens_max=3, agree=lambda done: bool(asked.append(done))) == []  # type: ignore[func-returns-value]
    assert asked == [True, True]


def test_an_empty_prompt_is_refused(model: KimiVL, questions: list[Question]) -> None:
    empty = dataclasses.replace(questions[1], prompt_tokens=[])
    with pytest.raises(InvalidConfigError, match="prompt is empty"):
        generate(model, [empty], stop_token=0, new_tokens_max=3)


def test_limits_must_be_positive(model: KimiVL) -> None:
    with pytest.raises(InvalidConfigError, match="limits must be positive"):
        generate(model, [], stop_token=0, new_tokens_max=0)
