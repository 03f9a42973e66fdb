"""Generation of answers to a rank's prompts, by the model in training, in its layout or in another.

A draw is keyed by (seed, step, prompt, number of the answer): it depends neither on the layout nor on what runs beside
it. Ranks that share layers or hold other stages answer together; context ranks answer a part of their prompts each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_api.job.objective import Objective
from polyreme_planner.drawing import ROWS_MAX
from polyreme_planner.int4_weights import WeightsKind
from polyreme_planner.latent_cache import CacheKind
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.tensor import whole_rows
from polyreme_trainer.rank_page import advance
from polyreme_trainer.serve.answers import settings_for
from polyreme_trainer.serve.choices import Choices
from polyreme_trainer.serve.engine import DecodePipeline, Engine, Made, Request
from polyreme_trainer.serve.int4 import held_as
from polyreme_trainer.train.forward import agreement, answering, decode_pipeline
from polyreme_trainer.train.rollouts.generation_model import GenerationModel
from polyreme_trainer.train.rollouts.record import Answer
from polyreme_trainer.train.rollouts.streams import DocumentPrompt
from polyreme_trainer.train.state import TrainState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The model that draws answers, and the ranks that draw with this one."""

    models: Sequence[KimiVL]
    """Parts that this rank holds, the last one last."""
    pipeline: DecodePipeline | None
    agree: Callable[[int], int]
    share: tuple[int, int]
    """Which of how many equal parts of a data-parallel rank's prompts are this rank's."""
    speaks: bool = True
    """Whether no other rank has the same answers."""
    stages_group: dist.ProcessGroup | None = None
    """Ranks that hold the other layers; None: there are none."""


def in_training_layout(state: TrainState, meshes: Meshes) -> Drawing:
    """Draw with the model in training; ranks of a pipeline or of shared layers draw the same together."""
    return Drawing(
        models=[model for _, model in sorted(state.models.items())],
        pipeline=decode_pipeline(state, meshes),
        agree=agreement(state, meshes),
        share=(meshes.place("cp"), meshes.layout.cp),
        speaks=not meshes.place("tp") and not meshes.place("pp"),
        stages_group=meshes.pp_group if meshes.layout.pp > 1 else None,
    )


def in_own_layout(copy: GenerationModel, meshes: Meshes) -> Drawing:
    """Draw with a copy of the model; all ranks with the same prompts share them."""
    layout, place = meshes.layout, meshes.place
    return Drawing(
        models=[copy.model],
        pipeline=None,
        agree=copy.agree,
        share=((place("pp") * layout.cp + place("cp")) * layout.tp + place("tp"), layout.pp * layout.cp * layout.tp),
    )


def generate(
    drawing: Drawing,
    prompts: Sequence[DocumentPrompt],
    objective: Objective,
    *,
    cache: CacheKind,
    stop_token: int,
    seed: int,
    step: int,
) -> list[list[Answer]]:
    """Answer each prompt several times; every rank calls it, also without prompts.

    Args:
        drawing: The model, up to date.
        prompts: This rank's own, each once.
        objective: Says how many answers, how long and how hot.
        cache: How latents are held.
        stop_token: Ends an answer.
        seed: Of the run.
        step: The step that learns from them.
    """
    model = drawing.models[-1]
    layers = sum(len(held.section.layers) for held in drawing.models)
    longest = max((len(prompt.prompt_tokens) for prompt in prompts), default=1) + objective.answer_tokens
    sizes = settings_for(model, layers=layers, tokens_max=longest, rows_max=ROWS_MAX, cache=cache)
    made: dict[int, list[Made]] = {}
    choices = Choices(model.shape.decoder) if objective.replays_routing else None
    held = held_as(WeightsKind.INT4 if objective.drawn_in_int4 else WeightsKind.AUTO, drawing.models)
    with whole_rows(model.ranks), answering(drawing.models), held:
        engine = Engine(model, sizes, pipeline=drawing.pipeline, agree=drawing.agree, choices=choices)
        for prompt in prompts:
            like: int | None = None
            for number in range(objective.samples):
                request = Request(
                    prompt=prompt,
                    new_tokens_max=objective.answer_tokens,
                    stop_token=stop_token,
                    temperature=float(objective.temperature),
                    seed=draw_seed(seed, step, prompt.key, number),
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
    sampled = [answers[place : place + objective.samples] for place in range(0, len(answers), objective.samples)]
    if choices is None:
        return sampled
    return _with_choices(sampled, prompts, choices, drawing, like=model.like)


def _with_choices(
    sampled: Sequence[Sequence[Answer]],
    prompts: Sequence[DocumentPrompt],
    choices: Choices,
    drawing: Drawing,
    *,
    like: Tensor,
) -> list[list[Answer]]:
    """Add to each answer where its tokens and those of its prompt went: the first answer's sequence ran the prompt."""
    numbers = itertools.count()
    taken = [
        choices.take(next(numbers), len(prompt.prompt_tokens) + len(answer.tokens) - 1)
        for prompt, of in zip(prompts, sampled, strict=True)
        for answer in of
    ]
    if drawing.stages_group is not None and taken:
        together = torch.cat(taken).to(like.device, torch.int32)  # NCCL adds no numbers of two bytes
        collectives.sum_over(together, drawing.stages_group)
        taken = list(together.cpu().to(taken[0].dtype).split([each.shape[0] for each in taken]))
    found, rest = [], iter(taken)
    for prompt, of in zip(prompts, sampled, strict=True):
        length, own = len(prompt.prompt_tokens), [next(rest).numpy() for _ in of]
        shared = own[0][:length]
        found.append(
            [
                dataclasses.replace(answer, chosen=each[length:], prompt_chosen=shared)
                for answer, each in zip(of, own, strict=True)
            ]
        )
    return found


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
