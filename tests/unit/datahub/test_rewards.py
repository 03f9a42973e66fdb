"""Rewards of answers by functions of users, which may do anything; the shipped ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest

from polyreme_api.errors import InvalidConfigError, StepFailedError
from polyreme_api.job.objective import Objective
from polyreme_api.rewards import Answered
from polyreme_datahub.rewards.functions import exact_match, pattern, thoughtful_match
from polyreme_datahub.rewards.rewarding import LIMITS, SandboxedRewards
from polyreme_datahub.tokenizer_file import byte_characters

HERE = "tests.unit.datahub.rewarded"
TOKENIZER = json.dumps({"added_tokens": [], "model": {"vocab": {of: at for at, of in byte_characters().items()}}})


def objective(function: str = f"{HERE}:words", **arguments: str) -> Objective:
    return Objective.model_validate({"kind": "GroupRelative", "reward": function, "rewardArguments": arguments})


def answered(answer: str, expected: str = "7", prompt: str = "which digit") -> Answered:
    return Answered(prompt=prompt.encode(), answer=answer.encode(), expected=expected.encode())


@pytest.fixture(scope="module")
def rewards() -> Iterator[SandboxedRewards]:
    made = SandboxedRewards(TOKENIZER.encode(), limits=dataclasses.replace(LIMITS, wall_s=1.0))
    yield made
    made.close()


def test_answers_get_the_rewards_of_the_function_in_order(rewards: SandboxedRewards) -> None:
    asked = [answered("7"), answered("a b c"), answered("é", prompt="which digit?")]
    seen = rewards.of(asked, objective())
    assert [one.reward for one in seen] == [11.0, 3.0, 101.0]
    assert (seen[2].prompt, seen[2].answer, seen[2].expected) == ("which digit?", "é", "7")
    assert [one.reward for one in rewards.of(asked[:1], objective(times="2"))] == [22.0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("hang", "took too long, expected at most 1 s"),
        ("raise", "ValueError: no such answer"),
        ("nan", "returned nan, expected a finite number"),
        ("text", "returned 'much', expected a finite number"),
        ("memory", "MemoryError"),
    ],
)
def test_a_function_that_misbehaves_is_named_with_its_answer(
    rewards: SandboxedRewards, answer: str, words: str
) -> None:
    with pytest.raises(StepFailedError) as failed:
        rewards.of([answered("fine"), answered(answer)], objective())
    assert f"reward of the answer {answer!r} failed" in str(failed.value)
    assert words in str(failed.value)
    assert failed.value.field == "spec.training.stages[].objective.reward"
    assert rewards.of([answered("fine")], objective())[0].reward == 1.0, "the next one is not harmed"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("nowhere.at_all:it", "nowhere.at_all:it can't be imported (No module named 'nowhere'"),
        (f"{HERE}:absent", "can't be imported"),
        (f"{HERE}:NUMBER", "is a int, expected a function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_before_the_run(
    rewards: SandboxedRewards, function: str, words: str
) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        rewards.check(objective(function))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"colour": "red"}, "can't be called with answer, expected, prompt, colour by name (got an unexpected keyword"),
        ({"answer": "7"}, "rewardArguments name 'answer', which every function is given anyway"),
    ],
    ids=str,
)
def test_arguments_that_a_function_does_not_take_are_refused_before_the_run(
    rewards: SandboxedRewards, arguments: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        rewards.check(objective(**arguments))
    assert words in str(refused.value)
    rewards.check(objective(times="2"))


def test_the_shipped_functions() -> None:
    both = {"expected": "7 ", "prompt": ""}
    assert (exact_match(answer=" 7", **both), exact_match(answer="8", **both)) == (1.0, 0.0)
    assert pattern(answer="seven\n", pattern="[a-z]+", **both) == 1.0
    assert pattern(answer="seven 7", pattern="[a-z]+", **both) == 0.0
    assert thoughtful_match(answer="<think>it has\na hook</think> 7", **both) == 1.0
    assert thoughtful_match(answer="<think>?</think>1", **both) == 0.2
    assert thoughtful_match(answer="<think>?</think>1", share="0.5", **both) == 0.5
    for wrong in ("7", "<think>7", "<think>a</think><think>b</think>7"):
        assert thoughtful_match(answer=wrong, **both) == 0.0
