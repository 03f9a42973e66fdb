"""Answers many prompts at once: each step runs one token of every answer, and pieces of the prompts of new ones.

Answers begin and end in any step, so no prompt waits for the longest answer of a batch (Orca, OSDI 2022). Latents stay
in pages between steps. What a sequence answers does not depend on what runs beside it, but for the order of sums.

Under expert parallelism every rank of a group must make the same passes: the ranks agree on each step, and one without
sequences takes part in it. The ranks of a pipeline, and those that share layers, have the same requests and so plan the
same steps; each holds the latents of its own layers. A pipeline runs a step in groups of sequences, so that its stages
work at the same time.

Legend: T tokens of a group, D model width, B rows that answer, V vocabulary, P patches, C values of a patch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polyreme_api.batch import Array
from polyreme_api.errors import InvalidConfigError
from polyreme_planner.latent_cache import CacheKind
from polyreme_trainer.model.decoder import Decoded
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.serve import scheduler
from polyreme_trainer.serve.attention import CachedAttention, lay_out, order
from polyreme_trainer.serve.cache import open_cache
from polyreme_trainer.serve.choices import Choices
from polyreme_trainer.serve.pages import Pages
from polyreme_trainer.serve.sampling import Draw, choose
from polyreme_trainer.serve.scheduler import Piece, Scheduler
from polyreme_trainer.serve.thinking import ThinkingBudget

PAGE_TOKENS = 16
"""Tokens of a page: a sequence wastes half of that on average, and a longer page is gathered faster."""

IDLE, DECODE, PREFILL = range(3)
"""What a rank wants of a step; the most that any rank wants is what all do."""


class Prompt(Protocol):
    """The part of ``polyreme_api.batch.EvaluationSample`` that decoding needs."""

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """Tokens, including media tokens, up to where the answer begins."""
        ...

    @property
    def patches_PC(self) -> Array:
        """Patches of the prompt's images."""
        ...

    @property
    def grids_I2(self) -> Array:
        """Rows and columns of each image [patches]."""
        ...


class DecodePipeline(Protocol):
    """The pipeline stages of the model; this rank holds some, and the ranks of all make the same calls."""

    @property
    def stages(self) -> Sequence[KimiVL]:
        """Parts of the model that this rank holds."""
        ...

    @property
    def groups(self) -> int:
        """Streams that should be under way at once."""
        ...

    def through(
        self, rows: int, begin: Callable[[KimiVL], Tensor], run: Callable[[KimiVL, Tensor], Tensor]
    ) -> Tensor | None:
        """Send a stream through all stages.

        Args:
            rows: Rows of the stream.
            begin: Makes the stream, on the first stage.
            run: Runs a stage.

        Returns:
            The output of the last stage, on the rank that holds it.
        """
        ...

    def share(self, rows: int, choose: Callable[[], Tensor] | None) -> Tensor:
        """Broadcast what the rank of the last stage chose: a token and its log-probability a row (float64)."""
        ...


class OneModel:
    """The whole model in one place: implements ``DecodePipeline``."""

    groups = 1

    def __init__(self, model: KimiVL) -> None:
        self.stages = (model,)

    def through(
        self,
        rows: int,  # noqa: ARG002
        begin: Callable[[KimiVL], Tensor],
        run: Callable[[KimiVL, Tensor], Tensor],
    ) -> Tensor:
        """Begin and run."""
        (model,) = self.stages
        return run(model, begin(model))

    def share(self, rows: int, choose: Callable[[], Tensor] | None) -> Tensor:
        """Choose here.

        Raises:
            InvalidConfigError: If there is no head; never for a whole model.
        """
        if choose is None:
            raise InvalidConfigError(f"the model has no head, so it can't answer {rows} prompts")
        return choose()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Sizes of an engine."""

    pages: int
    """Pages of the cache."""
    page_tokens: int = PAGE_TOKENS
    rows_max: int = 64
    """Answers that run at once."""
    prefill_tokens: int = 4096
    """Tokens of prompts in a step, at most: a step with more of them keeps running answers waiting."""
    cache: CacheKind = CacheKind.AUTO


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to answer."""

    prompt: Prompt
    new_tokens_max: int
    """Longest answer [tokens]."""
    stop_token: int
    """Ends the answer; it is part of it."""
    temperature: float = 0.0
    """0 takes the most likely token; else tokens are drawn, from logits divided by it."""
    seed: int = 0
    """Of the draws: the same seed, prompt and model give the same answer."""
    thinking: ThinkingBudget | None = None
    """None: it may think as long as it answers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A new token of an answer."""

    request: int
    token: int
    log_prob: float
    """Of the distribution that it was taken from."""
    ended: bool
    """Whether it is the last one."""


class Engine:
    """Takes requests at any time, and makes tokens step by step."""

    def __init__(
        self,
        model: KimiVL,
        settings: EngineSettings,
        *,
        pipeline: DecodePipeline | None = None,
        agree: Callable[[int], int] = int,
        choices: Choices | None = None,
    ) -> None:
        """Hold an empty cache.

        Args:
            model: The model, or the last part of it that this rank holds; not changed, and in evaluation mode.
            settings: Sizes.
            pipeline: The stages of the model, if it is not whole.
            agree: Largest of the numbers that the ranks give; a collective under expert parallelism.
            choices: Records to which experts tokens went; None: no record is kept.
        """
        self.settings = settings
        self.rests = False
        """Whether no rank had anything to do in the last step."""
        self._model, self._agree, self._choices = model, agree, choices
        self._pipeline = pipeline or OneModel(model)
        shape, held = model.shape.decoder, [stage.section.layers for stage in self._pipeline.stages]
        self.pages = Pages(settings.pages, page_tokens=settings.page_tokens)
        self.scheduler = Scheduler(self.pages, rows_max=settings.rows_max, prefill_tokens=settings.prefill_tokens)
        self._caches = {
            layers: open_cache(settings.cache, shape, layers, settings.pages, settings.page_tokens, like=model.like)
            for layers in held
        }
        self._requests: dict[int, Request] = {}
        self._embedded: dict[int, Tensor] = {}
        """Streams of prompts that have begun and not ended, on the first stage."""
        self._next = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs here."""
        return not self._requests

    def add(self, request: Request, *, like: int | None = None) -> int:
        """Let a request wait for its turn; return its number.

        Args:
            request: What to answer.
            like: Number of the first request with the same prompt; they share its latents while it runs.

        Raises:
            InvalidConfigError: If the prompt is empty, or the limit is not positive.
            RefusedError: If the cache has no room for it, were it alone.
        """
        if not request.prompt.prompt_tokens:
            raise InvalidConfigError("prompt is empty: 0 tokens, at least 1 is needed")
        if request.new_tokens_max < 1:
            raise InvalidConfigError(f"decoding limits must be positive: {request.new_tokens_max} tokens")
        number = self._next
        if request.prompt.prompt_tokens[-1] == self._model.media_token:
            like = None  # the last token runs once more, without its image
        self.scheduler.add(
            scheduler.Sequence(
                number=number,
                prompt=len(request.prompt.prompt_tokens),
                new_tokens_max=request.new_tokens_max,
                stop_token=request.stop_token,
                like=number if like is None else like,
            )
        )
        self._next += 1
        self._requests[number] = request
        return number

    def cancel(self, number: int) -> None:
        """Forget a request; one that has ended is ignored."""
        if self._requests.pop(number, None) is not None:
            self.scheduler.cancel(number)
            self._embedded.pop(number, None)

    @torch.no_grad()
    def step(self) -> list[Made]:
        """Run a step; with nothing to do, take part in that of the other ranks, if they have any.

        Raises:
            InvalidConfigError: If images do not fit their prompt.
        """
        planned = self.scheduler.plan()
        begins = any(piece.begin == 0 for piece in planned.pieces)
        wanted = self._agree(PREFILL if begins else DECODE if planned.pieces else IDLE)
        self.rests = wanted == IDLE
        if self.rests:
            return []
        for cache in self._caches.values():
            cache.copy(planned.copies)
        groups = [order(planned.pieces[place :: self._pipeline.groups]) for place in range(self._pipeline.groups)]
        streams_TD = [self._run(pieces, sees=wanted == PREFILL) for pieces in groups]
        planned.pieces[:] = [piece for pieces in groups for piece in pieces]
        answering = [piece for piece in planned.pieces if piece.answers]
        hidden_BD = None
        if streams_TD[0] is not None:
            hidden_BD = torch.cat([stream_TD for stream_TD in streams_TD if stream_TD is not None])
        chosen_B2 = self._pipeline.share(len(answering), self._chooser(hidden_BD, answering)).tolist()
        self.scheduler.ran(planned, [int(token) for token, _ in chosen_B2])
        return [
            self._made(piece.sequence, int(token), log_prob)
            for piece, (token, log_prob) in zip(answering, chosen_B2, strict=True)
        ]

    def _run(self, pieces: list[Piece], *, sees: bool) -> Tensor | None:
        """Send a group of pieces through the stages; return the hidden states of the rows that answer."""
        layout = lay_out(pieces, self.pages, like=self._model.like)

        def run(stage: KimiVL, stream_TD: Tensor) -> Tensor:
            cache = self._caches[stage.section.layers]
            decoded: Decoded = stage.decode(
                stream_TD, layout.position_T, lambda layer: CachedAttention(layout, cache, layer)
            )
            if self._choices is not None:
                self._choices.keep(pieces, stage.section, decoded.experts)
            return decoded.hidden_TD

        rows = layout.position_T.shape[0]
        hidden_TD = self._pipeline.through(rows, lambda first: self._begin(first, pieces, sees=sees), run)
        if hidden_TD is None:
            return None
        ends = itertools.accumulate(piece.end - piece.begin for piece in pieces)
        answering = [end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.answers]
        return hidden_TD.index_select(0, torch.tensor(answering, dtype=torch.int64, device=hidden_TD.device))

    def _begin(self, model: KimiVL, pieces: list[Piece], *, sees: bool) -> Tensor:
        """Make the stream of a group: embedded tokens, with features of images in place of media tokens of prompts."""
        new = [piece for piece in pieces if piece.begin == 0]
        single = [piece for piece in pieces if piece.begin and piece.sequence.number not in self._embedded]
        requests = [self._requests[piece.sequence.number] for piece in new]
        tokens: list[int] = []
        media: list[int] = []
        for piece, request in zip(new, requests, strict=True):
            prompt = request.prompt.prompt_tokens
            media += [len(tokens) + place for place, token in enumerate(prompt) if token == model.media_token]
            tokens += [*prompt, *piece.sequence.made]
        tokens += [self._last_token(piece) for piece in single]
        device = model.like.device
        features_MD = _features(model, [request.prompt for request in requests] if sees else [], sees=sees)
        embedded_TD = model.embed(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            features_MD,
            torch.tensor(media, dtype=torch.int64, device=device),
        )
        *streams, rest_BD = embedded_TD.split([*(piece.sequence.tokens for piece in new), len(single)])
        for piece, stream_TD in zip(new, streams, strict=True):
            self._embedded[piece.sequence.number] = stream_TD
        rest = iter(rest_BD.split(1))
        parts_TD = [embedded_TD[:0]]
        for piece in pieces:
            held_TD = self._embedded.get(piece.sequence.number)
            parts_TD.append(next(rest) if held_TD is None else held_TD[piece.begin : piece.end])
            if piece.answers:
                self._embedded.pop(piece.sequence.number, None)
        return torch.cat(parts_TD)

    def _last_token(self, piece: Piece) -> int:
        """Return the token of a piece of one, which may be the last one of a prompt that another shares."""
        prompt, made = self._requests[piece.sequence.number].prompt.prompt_tokens, piece.sequence.made
        return made[piece.begin - len(prompt)] if piece.begin >= len(prompt) else prompt[piece.begin]

    def _chooser(self, hidden_BD: Tensor | None, answering: list[Piece]) -> Callable[[], Tensor] | None:
        """Return the function that chooses the next token of each piece, if this rank has the head."""
        if hidden_BD is None:
            return None
        draws = []
        for piece in answering:
            request, made = self._requests[piece.sequence.number], piece.sequence.made
            forced = None if request.thinking is None else request.thinking.forced(made)
            draws.append(Draw(request.temperature, request.seed, len(made), forced))
        return lambda: choose(self._model.logits(hidden_BD), draws)

    def _made(self, sequence: scheduler.Sequence, token: int, log_prob: float) -> Made:
        if sequence.ended:
            del self._requests[sequence.number]
        return Made(request=sequence.number, token=token, log_prob=log_prob, ended=sequence.ended)


def _features(model: KimiVL, prompts: Sequence[Prompt], *, sees: bool) -> Tensor:
    """Encode the prompts' images; where no rank has new prompts, nothing is run."""
    if not sees:
        return model.like.new_zeros(0, model.shape.decoder.width)
    values = model.shape.vision.channels * model.shape.vision.patch_px**2
    patches = [np.asarray(prompt.patches_PC).reshape(-1, values) for prompt in prompts]
    # A copy, as in training: an answer must not depend on the alignment of NumPy's heap.
    patches_PC = torch.tensor(np.concatenate([np.zeros((0, values), np.uint8), *patches]), device=model.like.device)
    grids = [(int(rows), int(columns)) for prompt in prompts for rows, columns in np.asarray(prompt.grids_I2)]
    return model.image_features(patches_PC, grids)
