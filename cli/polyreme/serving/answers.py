"""Answers to a list of prompts, in their order, by an engine that runs many of them at once."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator

from polyreme_datahub.prompts import Prompt
from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.serve.answers import CACHE_BYTES_MAX, settings_for
from polyreme_trainer.serve.cache import CacheKind
from polyreme_trainer.serve.engine import Engine, EngineSettings, Request


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


def sizes(
    shape: DecoderShape,
    *,
    tokens_max: int,
    rows_max: int,
    cache: CacheKind = CacheKind.AUTO,
    cache_bytes_max: int = CACHE_BYTES_MAX,
) -> EngineSettings:
    """Return sizes for a whole model."""
    return settings_for(
        shape, shape.layers, tokens_max=tokens_max, rows_max=rows_max, cache=cache, cache_bytes_max=cache_bytes_max
    )


def answers(
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
    asked: deque[tuple[int, Answer | None]] = deque()
    running: dict[int, Answer] = {}
    coming = iter(prompts)
    ends = False
    while not ends or asked:
        while not ends and len(asked) < engine.settings.rows_max:
            try:
                prompt = next(coming)
            except StopIteration:
                ends = True
            else:
                asked.append(_begin(engine, running, prompt, stop_token, new_tokens_max))
        while asked and asked[0][0] not in running:
            yield asked.popleft()[1]
        for made in engine.step():
            take(running[made.request], made.token, made.log_prob, stop_token=stop_token)
            if made.ended:
                del running[made.request]


def _begin(
    engine: Engine, running: dict[int, Answer], prompt: Prompt | None, stop_token: int, new_tokens_max: int
) -> tuple[int, Answer | None]:
    if prompt is None:
        return -1, None
    number = engine.add(Request(prompt=prompt, new_tokens_max=new_tokens_max, stop_token=stop_token))
    running[number] = Answer(prompt_tokens=len(prompt.prompt_tokens))
    return number, running[number]


def take(answer: Answer, token: int, log_prob: float, *, stop_token: int) -> None:
    """Add a token to an answer."""
    answer.ended = token == stop_token
    if not answer.ended:
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
