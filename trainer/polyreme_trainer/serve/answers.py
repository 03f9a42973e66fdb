"""Greedy answers to many prompts, by an engine that takes them as its rows become free: what evaluation asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from polyreme_planner.latent_cache import CacheKind, token_bytes
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.rank_page import advance
from polyreme_trainer.serve.engine import PAGE_TOKENS, Engine, EngineSettings, Made, Prompt, Request
from polyreme_trainer.serve.thinking import ThinkingBudget

CACHE_BYTES_MAX = 1 << 30
"""Latents that evaluation keeps on a rank, at most, unless one prompt alone needs more."""

Asked = TypeVar("Asked", bound=Prompt)


def settings_for(
    model: KimiVL,
    *,
    tokens_max: int,
    rows_max: int,
    layers: int | None = None,
    cache: CacheKind = CacheKind.AUTO,
    cache_bytes_max: int = CACHE_BYTES_MAX,
) -> EngineSettings:
    """Return sizes for sequences of at most ``tokens_max`` tokens: room for all rows at once, within bounds of memory.

    Args:
        model: The model, or a part of it.
        tokens_max: Of a prompt and its answer.
        rows_max: Answers that run at once.
        layers: That this rank holds, if ``model`` is not all of them; None: those of the model.
        cache: How latents are held.
        cache_bytes_max: Of them, at most, unless one sequence alone needs more.
    """
    longest = -(-tokens_max // PAGE_TOKENS)
    token = token_bytes(model.shape.decoder, cache, number_bytes=model.like.element_size())
    page_bytes = token * PAGE_TOKENS * max(1, len(model.section.layers) if layers is None else layers)
    pages = max(longest, min(rows_max * longest, cache_bytes_max // page_bytes))
    return EngineSettings(pages=pages, rows_max=rows_max, cache=cache)


def answers(
    engine: Engine,
    prompts: Iterable[Asked],
    *,
    stop_token: int,
    new_tokens_max: int,
    thinking: ThinkingBudget | None = None,
) -> Iterator[tuple[int, Asked, list[Made]]]:
    """Yield each prompt with its place and its new tokens, the stop token included, in the order in which they end.

    Prompts are taken only as rows become free. Ranks that depend on each other all call it, also without prompts.

    Args:
        engine: With nothing to do yet.
        prompts: What to answer.
        stop_token: Ends an answer.
        new_tokens_max: Longest answer [tokens].
        thinking: How long each may think; None: no limit.

    Raises:
        InvalidConfigError: If a prompt is empty, the limit is not positive, or images do not fit their prompt.
        RefusedError: If the cache has no room for one.
    """
    coming = enumerate(prompts)
    asked: dict[int, tuple[int, Asked, list[Made]]] = {}
    while True:
        while len(asked) < engine.settings.rows_max and (following := next(coming, None)) is not None:
            place, prompt = following
            request = Request(prompt=prompt, new_tokens_max=new_tokens_max, stop_token=stop_token, thinking=thinking)
            asked[engine.add(request)] = (place, prompt, [])
        advance()
        for made in engine.step():
            asked[made.request][2].append(made)
            if made.ended:
                yield asked.pop(made.request)
        if engine.rests:
            return
