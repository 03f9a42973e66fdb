"""Answers to a list of prompts, in their order, by an engine that runs many of them at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from polyreme_datahub.prompts import Prompt
from polyreme_trainer.serve.answers import answers
from polyreme_trainer.serve.engine import Engine


@dataclasses.dataclass(slots=True, kw_only=True)
class Answer:
    """What a model wrote."""

    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Without the one that ends it."""
    log_probs: list[float] = dataclasses.field(default_factory=list)
    """Of its tokens."""
    ended: bool = False
    """Whether the model ended it; else it is as long as it may be."""


def answers_in_order(
    engine: Engine, prompts: Iterable[Prompt | None], *, stop_token: int, new_tokens_max: int
) -> Iterator[Answer | None]:
    """Yield the answer of each prompt, in order; None for one that is None. Prompts are taken as rows become free.

    Args:
        engine: With nothing to do yet.
        prompts: What to answer.
        stop_token: Ends an answer.
        new_tokens_max: Longest answer [tokens].

    Raises:
        RefusedError: If the cache has no room for one.
    """
    order: deque[int | None] = deque()
    """What was taken and is not yielded yet: the place among the prompts, or None."""
    whole: dict[int, Answer] = {}
    places = itertools.count()

    def taken() -> Iterator[Prompt]:
        for prompt in prompts:
            order.append(None if prompt is None else next(places))
            if prompt is not None:
                yield prompt

    for place, prompt, made in answers(engine, taken(), stop_token=stop_token, new_tokens_max=new_tokens_max):
        whole[place] = Answer(prompt_tokens=len(prompt.prompt_tokens))
        for one in made:
            take(whole[place], one.token, one.log_prob, stop_token=stop_token)
        while order and (order[0] is None or order[0] in whole):
            first = order.popleft()
            yield None if first is None else whole.pop(first)
    yield from (None for _ in order)


def take(answer: Answer, token: int, log_prob: float, *, stop_token: int) -> None:
    """Add a token to an answer."""
    answer.ended = token == stop_token
    if not answer.ended:
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
