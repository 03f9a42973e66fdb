"""Generation of answers to a rank's prompts, by the model in training, in the layout in which it is trained.

A draw is keyed by (seed, step, prompt, number of the answer): it depends neither on the layout nor on what runs beside
it. Ranks that share layers or hold other stages answer together; context ranks answer a part of their prompts each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from polyreme_api.job.objective import Objective
from polyreme_planner.latent_cache import CacheKind
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.tensor import whole_rows
from polyreme_trainer.rank_page import advance
from polyreme_trainer.serve.answers import settings_for
from polyreme_trainer.serve.engine import Engine, Made, Request
from polyreme_trainer.train.forward import agreement, answering, decode_pipeline
from polyreme_trainer.train.rollouts.record import Answer
from polyreme_trainer.train.rollouts.streams import DocumentPrompt
from polyreme_trainer.train.state import TrainState, settle

ROWS_MAX = 64
"""Answers that a rank decodes together."""


def generate(
    state: TrainState,
    prompts: Sequence[DocumentPrompt],
    objective: Objective,
    meshes: Meshes,
    *,
    cache: CacheKind,
    stop_token: int,
    seed: int,
) -> list[list[Answer]]:
    """Answer each prompt several times; every rank calls it, also without prompts.

    Args:
        state: With the model.
        prompts: This rank's own, each once.
        objective: Says how many answers, how long and how hot.
        meshes: The rank's groups.
        cache: How latents are held.
        stop_token: Ends an answer.
        seed: Of the run.
    """
    settle(state)
    model = max(state.models.items())[1]
    layers = sum(len(held.section.layers) for held in state.models.values())
    longest = max((len(prompt.prompt_tokens) for prompt in prompts), default=1) + objective.answer_tokens
    sizes = settings_for(model, layers=layers, tokens_max=longest, rows_max=ROWS_MAX, cache=cache)
    made: dict[int, list[Made]] = {}
    with whole_rows(model.ranks), answering(state.models.values()):
        engine = Engine(model, sizes, pipeline=decode_pipeline(state, meshes), agree=agreement(state, meshes))
        for prompt in prompts:
            like: int | None = None
            for number in range(objective.samples):
                request = Request(
                    prompt=prompt,
                    new_tokens_max=objective.answer_tokens,
                    stop_token=stop_token,
                    temperature=float(objective.temperature),
                    seed=draw_seed(seed, state.step + 1, prompt.key, number),
                )
                added = engine.add(request, like=like)
                like = added if like is None else like
                made[added] = []
        while True:
            advance()
            for one in engine.step():
                made[one.request].append(one)
            if engine.rests:
                break
    answers = [answer_of(tokens, stop=stop_token, media=model.media_token) for tokens in made.values()]
    return [answers[place : place + objective.samples] for place in range(0, len(answers), objective.samples)]


def draw_seed(seed: int, step: int, prompt: str, number: int) -> int:
    """Return the seed of an answer's draws."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{prompt}:{number}".encode()).digest()[:8])


def answer_of(tokens: Sequence[Made], *, stop: int, media: int) -> Answer:
    """Return an answer; one that names an image where there is none has no end, and so is not learned."""
    return Answer(
        tokens=tuple(one.token for one in tokens),
        log_probs=tuple(one.log_prob for one in tokens),
        ended=tokens[-1].token == stop and all(one.token != media for one in tokens),
    )
