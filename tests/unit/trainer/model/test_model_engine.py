"""The engine gives the same answers as decoding without a cache, whatever runs beside each other."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyreme_api.batch import Array
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_planner.latent_cache import CacheKind, token_bytes
from polyreme_planner.shapes import KIMI_VL_A3B
from polyreme_trainer.serve.answers import answers, settings_for
from polyreme_trainer.serve.cache import open_cache
from polyreme_trainer.serve.engine import Engine, EngineSettings, Request
from polyreme_trainer.serve.thinking import ThinkingBudget

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


def generate(
    model: KimiVL,
    questions: Sequence[Question],
    *,
    stop_token: int,
    new_tokens_max: int,
    agree: Callable[[int], int] = int,
    thinking: ThinkingBudget | None = None,
    **sizes: Any,
) -> list[list[int]]:
    settings = dataclasses.replace(settings_for(model, tokens_max=64, rows_max=8), **sizes)
    engine = Engine(model.eval(), settings, agree=agree)
    made = answers(engine, questions, stop_token=stop_token, new_tokens_max=new_tokens_max, thinking=thinking)
    answered = {place: [one.token for one in tokens] for place, _, tokens in made}
    assert engine.pages.free == engine.pages.total, "every page came back"
    return [answered[place] for place in range(len(questions))]


TIGHT: dict[str, dict[str, Any]] = {
    "whole": {},
    "two rows": {"rows_max": 2},
    "pieces": {"prefill_tokens": 3},
    "pages of one token": {"page_tokens": 1, "pages": 40},
    "no room for all": {"page_tokens": 2, "pages": 13},
}


@pytest.mark.parametrize("sizes", TIGHT.values(), ids=TIGHT)
def test_answers_equal_a_naive_loop(model: KimiVL, questions: list[Question], sizes: dict[str, Any]) -> None:
    never = model.shape.decoder.vocabulary
    expected = [naive(model, question, never, 6) for question in questions]
    assert len({tuple(answer) for answer in expected}) == len(questions)
    assert generate(model, questions, stop_token=never, new_tokens_max=6, **sizes) == expected


def test_an_answer_ends_with_the_stop_token_and_the_others_proceed(model: KimiVL, questions: list[Question]) -> None:
    free = generate(model, questions, stop_token=-1, new_tokens_max=6)
    stop_token = free[2][3]
    expected = [naive(model, question, stop_token, 6) for question in questions]
    made = generate(model, questions, stop_token=stop_token, new_tokens_max=6)
    assert made == expected
    assert len(made[2]) <= 4
    assert made[2][-1] == stop_token
    assert max(map(len, made)) == 6


def test_a_thought_is_ended_by_its_budget_unless_it_has_ended(model: KimiVL, questions: list[Question]) -> None:
    free = generate(model, questions, stop_token=-1, new_tokens_max=7)
    done = free[0][:2]
    budget = ThinkingBudget(tokens_max=2, end=(31, 32), has_ended=lambda made: list(made) == done)
    made = generate(model, questions, stop_token=-1, new_tokens_max=7, thinking=budget)
    assert made[0] == free[0], "it ended by itself"
    for answer, unbounded in zip(made[1:], free[1:], strict=True):
        assert answer[:4] == [*unbounded[:2], 31, 32]
        assert len(answer) == 7
    asked = questions[1]
    longer = dataclasses.replace(asked, prompt_tokens=[*asked.prompt_tokens, *made[1][:4]])
    assert made[1][4:] == naive(model, longer, -1, 3), "it answers after the tag as after any text"


def test_a_media_token_that_the_model_says_itself_needs_no_image(model: KimiVL, questions: list[Question]) -> None:
    model.language_model.lm_head.weight.data.zero_()  # all tokens are equally likely, the first index wins
    model.media_token = 0
    made = generate(model, questions[1:2], stop_token=-1, new_tokens_max=3, page_tokens=1, pages=16)
    assert made == [[0, 0, 0]]


def test_a_rank_that_is_done_takes_part_until_all_are(model: KimiVL, questions: list[Question]) -> None:
    first = generate(model, questions[:1], stop_token=-1, new_tokens_max=1)[0][0]
    asked: list[int] = []

    def others_have_three_steps(wanted: int) -> int:
        asked.append(wanted)
        return max(wanted, 1 if len(asked) < 4 else 0)

    made = generate(model, questions[:1], stop_token=first, new_tokens_max=4, agree=others_have_three_steps)
    assert made == [[first]]
    assert asked == [2, 0, 0, 0]


def test_a_rank_without_prompts_takes_part(model: KimiVL) -> None:
    wanted_by_others = iter([2, 1, 0])
    assert generate(model, [], stop_token=0, new_tokens_max=3, agree=lambda _: next(wanted_by_others)) == []


def test_samples_of_one_prompt_share_its_pages_and_answer_alike(model: KimiVL, questions: list[Question]) -> None:
    question, never = questions[2], model.shape.decoder.vocabulary
    engine = Engine(model.eval(), EngineSettings(pages=16, page_tokens=4, rows_max=4))
    request = Request(prompt=question, new_tokens_max=6, stop_token=never)
    first = engine.add(request)
    others = [engine.add(request, like=first) for _ in range(2)]
    made: dict[int, list[int]] = {number: [] for number in (first, *others)}
    used = 0
    while not engine.idle:
        for one in engine.step():
            made[one.request].append(one.token)
        used = max(used, engine.pages.total - engine.pages.free)
    assert set(map(tuple, made.values())) == {tuple(naive(model, question, never, 6))}
    # Of 17 tokens four pages are shared; then the first has two of its own for 21 tokens, the others one for 20.
    assert used == 4 + 2 + 1 + 1
    assert engine.pages.free == engine.pages.total


def test_samples_of_a_prompt_that_ends_with_an_image_answer_alike(model: KimiVL, questions: list[Question]) -> None:
    words = [token for token in questions[4].prompt_tokens if token != model.media_token]
    shown = dataclasses.replace(questions[4], prompt_tokens=[*words, model.media_token])
    engine = Engine(model.eval(), EngineSettings(pages=16, page_tokens=4, rows_max=4))
    request = Request(prompt=shown, new_tokens_max=3, stop_token=-1)
    first = engine.add(request)
    second = engine.add(request, like=first)
    made: dict[int, list[int]] = {first: [], second: []}
    while not engine.idle:
        for one in engine.step():
            made[one.request].append(one.token)
    assert made[first] == made[second] == naive(model, shown, -1, 3)


def test_log_probabilities_are_those_of_a_training_forward(model: KimiVL, questions: list[Question]) -> None:
    engine = Engine(model.eval(), EngineSettings(pages=64, page_tokens=4, rows_max=8, prefill_tokens=9))
    requests = [Request(prompt=question, new_tokens_max=8, stop_token=-1) for question in questions]
    numbers = {engine.add(request): request for request in requests}
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    scores: dict[int, list[float]] = {number: [] for number in numbers}
    while not engine.idle:
        for made in engine.step():
            tokens[made.request].append(made.token)
            scores[made.request].append(made.log_prob)
    for number, request in numbers.items():
        prompt = list(request.prompt.prompt_tokens)
        tokens_T = torch.tensor(prompt + tokens[number][:-1])
        patches_PC = torch.from_numpy(np.asarray(request.prompt.patches_PC))
        grids = [(int(rows), int(columns)) for rows, columns in np.asarray(request.prompt.grids_I2)]
        with torch.no_grad():
            hidden_TD = model(
                tokens_T,
                torch.arange(len(tokens_T)),
                [0, len(tokens_T)],
                patches_PC,
                grids,
            ).hidden_TD
            all_TV = model.logits(hidden_TD[len(prompt) - 1 :]).log_softmax(-1)
        expected_T = all_TV.gather(1, torch.tensor(tokens[number]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(scores[number]), expected_T, rtol=0, atol=1e-5)


def test_latents_in_eight_bits_change_little(model: KimiVL, questions: list[Question]) -> None:
    def scores(cache: CacheKind) -> Tensor:
        engine = Engine(model.eval(), EngineSettings(pages=64, rows_max=8, prefill_tokens=7, cache=cache))
        for question in questions:
            engine.add(Request(prompt=question, new_tokens_max=1, stop_token=-1))
        made = []
        while not engine.idle:
            made += engine.step()
        return torch.tensor([one.log_prob for one in sorted(made, key=lambda one: one.request)])

    full, small = scores(CacheKind.AUTO), scores(CacheKind.INT8)
    assert not torch.equal(full, small)
    torch.testing.assert_close(full, small, rtol=0, atol=0.05)


def test_draws_depend_on_seed_and_place_alone(model: KimiVL, questions: list[Question]) -> None:
    def drawn(rows_max: int, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        engine = Engine(model.eval(), EngineSettings(pages=64, rows_max=rows_max))
        for seed in seeds:
            engine.add(Request(prompt=questions[0], new_tokens_max=8, stop_token=-1, temperature=1.0, seed=seed))
        tokens: dict[int, list[int]] = {}
        while not engine.idle:
            for made in engine.step():
                tokens.setdefault(made.request, []).append(made.token)
        return [tuple(answer) for _, answer in sorted(tokens.items())]

    together = drawn(4, range(4))
    assert len(set(together)) == 4
    assert drawn(1, [2]) == together[2:3]


def test_an_empty_prompt_is_refused(model: KimiVL, questions: list[Question]) -> None:
    empty = dataclasses.replace(questions[1], prompt_tokens=[])
    with pytest.raises(InvalidConfigError, match="prompt is empty"):
        generate(model, [empty], stop_token=0, new_tokens_max=3)


def test_limits_must_be_positive(model: KimiVL, questions: list[Question]) -> None:
    with pytest.raises(InvalidConfigError, match="limits must be positive"):
        generate(model, questions[:1], stop_token=0, new_tokens_max=0)


def test_what_can_never_fit_is_refused_at_once(model: KimiVL, questions: list[Question]) -> None:
    with pytest.raises(RefusedError, match="17 tokens of prompt and up to 40 of answer, the cache has room for 48"):
        generate(model, questions[2:3], stop_token=0, new_tokens_max=40, pages=3)


@pytest.mark.parametrize(("kind", "bytes_"), [(CacheKind.AUTO, 1152), (CacheKind.INT8, 656)])
def test_a_token_of_kimi_vl_takes_the_bytes_of_the_formula(kind: CacheKind, bytes_: int) -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    cache = open_cache(kind, KIMI_VL_A3B.decoder, range(1, 3), 5, 16, like=like)
    assert token_bytes(KIMI_VL_A3B.decoder, kind, number_bytes=2) == bytes_
    assert cache.size_bytes == bytes_ * 2 * 5 * 16
