"""Greedy free-running decoding of many prompts at once, with keys and values kept between steps.

Prompts are packed for the first pass, as in training; each later pass runs one token a prompt. Under expert parallelism
every rank of a group must run the same passes: ``agree`` makes them stop together, and one without prompts takes part.
The ranks of a pipeline answer the same prompts together, each with the keys and values of its own layers
(``DecodePipeline``).

Legend: B prompts, T tokens of all prompts, L places of the cache, H heads, Q width of a key, V width of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme_api.batch import Array
from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.model.segment_attention import Attend, segments
from polyreme_trainer.model.vlm import KimiVL

PROMPTS_AT_ONCE = 256
"""Prompts decoded together; bounds the memory of the cache."""


class Prompt(Protocol):
    """The part of ``polyreme_api.batch.EvaluationSample`` that decoding needs."""

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """Tokens, including media tokens, up to where the answer begins."""
        ...

    @property
    def patches_PC(self) -> Array:
        """Normalised patches of the prompt's images."""
        ...

    @property
    def grids_I2(self) -> Array:
        """Rows and columns of each image [patches]."""
        ...


class DecodePipeline(Protocol):
    """The pipeline stages of the model; this rank holds some, and the ranks of all make the same calls."""

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

    def share_tokens(self, prompts: int, choose: Callable[[], Tensor] | None) -> Tensor:
        """Broadcast the tokens (int64, one per prompt) of the rank that can choose them."""
        ...


class OneModel:
    """The whole model in one place: implements ``DecodePipeline``."""

    def __init__(self, model: KimiVL) -> None:
        self._model = model

    def through(
        self,
        rows: int,  # noqa: ARG002
        begin: Callable[[KimiVL], Tensor],
        run: Callable[[KimiVL, Tensor], Tensor],
    ) -> Tensor:
        """Begin and run."""
        return run(self._model, begin(self._model))

    def share_tokens(self, prompts: int, choose: Callable[[], Tensor] | None) -> Tensor:
        """Choose them here.

        Raises:
            InvalidConfigError: If there is no head; never for a whole model.
        """
        if choose is None:
            raise InvalidConfigError(f"the model has no head, so it can't answer {prompts} prompts")
        return choose()


@torch.no_grad()
def generate(
    model: KimiVL,
    prompts: Sequence[Prompt],
    *,
    stop_token: int,
    new_tokens_max: int,
    agree: Callable[[bool], bool] = bool,
    prompts_at_once: int = PROMPTS_AT_ONCE,
    pipeline: DecodePipeline | None = None,
) -> list[list[int]]:
    """Decode greedily: take the most likely token repeatedly.

    Args:
        model: The model, or the last part of it that this rank holds; not changed.
        prompts: What to answer; the ranks of an expert-parallel group need equally many batches of ``prompts_at_once``.
        stop_token: Ends an answer; it is part of the answer.
        new_tokens_max: Longest answer [tokens].
        agree: Whether all ranks are done, given whether this one is; a collective under expert parallelism.
        prompts_at_once: Prompts decoded together.
        pipeline: The stages of the model, if it is not whole.

    Returns:
        The new tokens of each prompt, with the stop token if it came.

    Raises:
        InvalidConfigError: If a prompt is empty, a limit is not positive, or images do not fit their prompt.
    """
    if new_tokens_max < 1 or prompts_at_once < 1:
        raise InvalidConfigError(
            f"decoding limits must be positive: {new_tokens_max} tokens, {prompts_at_once} prompts"
        )
    if not all(prompt.prompt_tokens for prompt in prompts):
        raise InvalidConfigError("prompt is empty: 0 tokens, at least 1 is needed")
    answers: list[list[int]] = []
    for number in range(max(1, math.ceil(len(prompts) / prompts_at_once))):
        chosen = prompts[number * prompts_at_once : (number + 1) * prompts_at_once]
        through = pipeline or OneModel(model)
        answers.extend(
            _generate_batch(model, through, chosen, stop_token=stop_token, new_tokens_max=new_tokens_max, agree=agree)
        )
    return answers


class _Cache:
    """Keys and values of the layers that run here; rows are prompts, places are positions."""

    def __init__(self, shape: DecoderShape, prompts: int, places: int, *, heads: int, like: Tensor) -> None:
        self._empty_BHLQ = lambda: like.new_zeros(prompts, heads, places, shape.query_dim)
        self._empty_BHLV = lambda: like.new_zeros(prompts, heads, places, shape.value_dim)
        self.keys_BHLQ: dict[int, Tensor] = {}
        self.values_BHLV: dict[int, Tensor] = {}
        self.place_L = torch.arange(places, device=like.device)

    def prefill(self, layer: int, attend: Attend, row_T: Tensor, position_T: Tensor) -> Attend:
        """Attend within each prompt, and keep the keys and values for later tokens."""
        self.keys_BHLQ[layer], self.values_BHLV[layer] = self._empty_BHLQ(), self._empty_BHLV()

        def keep(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor) -> Tensor:
            self.keys_BHLQ[layer][row_T, :, position_T] = k_THQ
            self.values_BHLV[layer][row_T, :, position_T] = v_THV
            return attend(q_THQ, k_THQ, v_THV)

        return keep

    def extend(self, layer: int, row_B: Tensor, position_B: Tensor) -> Attend:
        """Attend from one new token per prompt to all before it."""
        seen_B11L = (self.place_L <= position_B.unsqueeze(1))[:, None, None]

        def look(q_BHQ: Tensor, k_BHQ: Tensor, v_BHV: Tensor) -> Tensor:
            keys_BHLQ, values_BHLV = self.keys_BHLQ[layer], self.values_BHLV[layer]
            keys_BHLQ[row_B, :, position_B] = k_BHQ
            values_BHLV[row_B, :, position_B] = v_BHV
            q_BH1Q = q_BHQ.unsqueeze(2)
            return F.scaled_dot_product_attention(q_BH1Q, keys_BHLQ, values_BHLV, attn_mask=seen_B11L).squeeze(2)

        return look


def _generate_batch(
    model: KimiVL,
    pipeline: DecodePipeline,
    prompts: Sequence[Prompt],
    *,
    stop_token: int,
    new_tokens_max: int,
    agree: Callable[[bool], bool],
) -> list[list[int]]:
    device = model.like.device
    lengths_B = torch.tensor([len(prompt.prompt_tokens) for prompt in prompts], dtype=torch.int64, device=device)
    row_B = torch.arange(len(prompts), device=device)
    cache, hidden_BD = _prefill(model, pipeline, prompts, lengths_B, new_tokens_max)
    made: list[Tensor] = []
    done_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(new_tokens_max):
        token_B = pipeline.share_tokens(len(prompts), _best(model, hidden_BD))
        made.append(token_B)
        done_B |= token_B == stop_token
        if step == new_tokens_max - 1 or agree(bool(done_B.all())):
            break
        hidden_BD = _extend(pipeline, cache, token_B, row_B, lengths_B + step)
    return [_until(tokens, stop_token) for tokens in torch.stack(made, dim=1).tolist()]


def _best(model: KimiVL, hidden_BD: Tensor | None) -> Callable[[], Tensor] | None:
    """Return the function that chooses the most likely token of each prompt, if this rank has the head."""
    return None if hidden_BD is None else lambda: model.logits(hidden_BD).argmax(-1)


def _extend(
    pipeline: DecodePipeline, cache: _Cache, token_B: Tensor, row_B: Tensor, position_B: Tensor
) -> Tensor | None:
    """Run one more token of each prompt."""

    def run(model: KimiVL, stream_BD: Tensor) -> Tensor:
        return model.decode(stream_BD, position_B, lambda layer: cache.extend(layer, row_B, position_B)).hidden_TD

    def begin(model: KimiVL) -> Tensor:
        embedded_BD: Tensor = model.language_model.model.embed(token_B)
        return embedded_BD

    return pipeline.through(token_B.shape[0], begin, run)


def _prefill(
    model: KimiVL, pipeline: DecodePipeline, prompts: Sequence[Prompt], lengths_B: Tensor, new_tokens_max: int
) -> tuple[_Cache, Tensor | None]:
    """Run the prompts packed; return the cache and the last hidden state of each prompt, on the last stage."""
    like = model.like
    tokens = [token for prompt in prompts for token in prompt.prompt_tokens]
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=like.device)
    lengths: list[int] = lengths_B.tolist()
    ends_B = lengths_B.cumsum(0)
    row_T = torch.repeat_interleave(torch.arange(len(prompts), device=like.device), lengths_B)
    position_T = torch.arange(len(tokens), device=like.device) - (ends_B - lengths_B)[row_T]
    documents = segments(lengths, causal=True, device=like.device, dtype=like.dtype)
    places = max(lengths, default=0) + new_tokens_max
    heads = model.shape.decoder.heads // model.ranks.parts
    cache = _Cache(model.shape.decoder, len(prompts), places, heads=heads, like=like)

    def run(stage: KimiVL, stream_TD: Tensor) -> Tensor:
        return stage.decode(
            stream_TD, position_T, lambda layer: cache.prefill(layer, documents.attend, row_T, position_T)
        ).hidden_TD

    hidden_TD = pipeline.through(len(tokens), lambda first: first.embed(tokens_T, _features(first, prompts)), run)
    return cache, None if hidden_TD is None else hidden_TD.index_select(0, ends_B - 1)


def _features(model: KimiVL, prompts: Sequence[Prompt]) -> Tensor:
    """Encode the prompts' images, on the first stage."""
    values = model.shape.vision.channels * model.shape.vision.patch_px**2
    patches = [np.asarray(prompt.patches_PC).reshape(-1, values) for prompt in prompts]
    # A copy, as in training: an answer must not depend on the alignment of NumPy's heap.
    patches_PC = torch.tensor(np.concatenate([np.zeros((0, values), np.uint8), *patches]), device=model.like.device)
    grids = [(int(rows), int(columns)) for prompt in prompts for rows, columns in np.asarray(prompt.grids_I2)]
    return model.image_features(patches_PC, grids)


def _until(tokens: list[int], stop_token: int) -> list[int]:
    return tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens
