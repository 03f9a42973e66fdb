"""Greedy free-running decoding of many prompts at once, with keys and values kept between steps.

Prompts are packed for the first pass, as in training; each later pass runs one token a prompt. Under expert parallelism
every rank of a group must run the same passes: ``agree`` makes them stop together, and one without prompts takes part.

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
from polyreme_api.plan.shapes import DecoderShape
from polyreme_trainer.model.attend import Attend, segments
from polyreme_trainer.model.vlm import KimiVL

PROMPTS_AT_ONCE = 256
"""Prompts decoded together; bounds the memory of the cache."""


class Prompt(Protocol):
    """What decoding needs of ``polyreme_api.batch.EvaluationSample``."""

    @property
    def prompt_tokens(self) -> Sequence[int]:
        """Tokens, media tokens included, up to where the answer begins."""
        ...

    @property
    def patches_PC(self) -> Array:
        """Normalised patches of the prompt's images."""
        ...

    @property
    def grids_I2(self) -> Array:
        """Rows and columns of each image [patches]."""
        ...


@torch.no_grad()
def generate(
    model: KimiVL,
    prompts: Sequence[Prompt],
    *,
    stop_token: int,
    new_tokens_max: int,
    agree: Callable[[bool], bool] = bool,
    prompts_at_once: int = PROMPTS_AT_ONCE,
) -> list[list[int]]:
    """Take the most likely token again and again.

    Args:
        model: The model; not changed.
        prompts: What to answer; the ranks of an expert-parallel group need equally many batches of ``prompts_at_once``.
        stop_token: Ends an answer; it is part of the answer.
        new_tokens_max: Longest answer [tokens].
        agree: Whether all ranks are done, given whether this one is; a collective under expert parallelism.
        prompts_at_once: Prompts decoded together.

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
        answers.extend(_generate_batch(model, chosen, stop_token, new_tokens_max, agree))
    return answers


class _Cache:
    """Keys and values of every layer; rows are prompts, places are positions."""

    def __init__(self, shape: DecoderShape, lengths_B: Tensor, places: int, *, heads: int, like: Tensor) -> None:
        prompts = lengths_B.shape[0]
        self.keys_BHLQ = [like.new_zeros(prompts, heads, places, shape.query_dim) for _ in range(shape.layers)]
        self.values_BHLV = [like.new_zeros(prompts, heads, places, shape.value_dim) for _ in range(shape.layers)]
        self.place_L = torch.arange(places, device=like.device)

    def prefill(self, layer: int, attend: Attend, row_T: Tensor, position_T: Tensor) -> Attend:
        """Attend within each prompt, and keep what later tokens will look at."""

        def keep(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor) -> Tensor:
            self.keys_BHLQ[layer][row_T, :, position_T] = k_THQ
            self.values_BHLV[layer][row_T, :, position_T] = v_THV
            return attend(q_THQ, k_THQ, v_THV)

        return keep

    def extend(self, layer: int, row_B: Tensor, position_B: Tensor) -> Attend:
        """Attend from one new token a prompt to all before it."""
        seen_B11L = (self.place_L <= position_B.unsqueeze(1))[:, None, None]

        def look(q_BHQ: Tensor, k_BHQ: Tensor, v_BHV: Tensor) -> Tensor:
            keys_BHLQ, values_BHLV = self.keys_BHLQ[layer], self.values_BHLV[layer]
            keys_BHLQ[row_B, :, position_B] = k_BHQ
            values_BHLV[row_B, :, position_B] = v_BHV
            q_BH1Q = q_BHQ.unsqueeze(2)
            return F.scaled_dot_product_attention(q_BH1Q, keys_BHLQ, values_BHLV, attn_mask=seen_B11L).squeeze(2)

        return look


def _generate_batch(
    model: KimiVL, prompts: Sequence[Prompt], stop_token: int, new_tokens_max: int, agree: Callable[[bool], bool]
) -> list[list[int]]:
    device = model.language_model.lm_head.weight.device
    lengths = [len(prompt.prompt_tokens) for prompt in prompts]
    lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    row_B = torch.arange(len(prompts), device=device)
    cache, hidden_BD = _prefill(model, prompts, lengths, max(lengths, default=0) + new_tokens_max)
    made: list[Tensor] = []
    done_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(new_tokens_max):
        token_B = model.logits(hidden_BD).argmax(-1)
        made.append(token_B)
        done_B |= token_B == stop_token
        if step == new_tokens_max - 1 or agree(bool(done_B.all())):
            break
        position_B = lengths_B + step
        embedded_BD = model.language_model.model.embed(token_B)
        decoded = model.decode(embedded_BD, position_B, lambda layer: cache.extend(layer, row_B, position_B))  # noqa: B023
        hidden_BD = decoded.hidden_TD
    return [_until(tokens, stop_token) for tokens in torch.stack(made, dim=1).tolist()]


def _prefill(model: KimiVL, prompts: Sequence[Prompt], lengths: list[int], places: int) -> tuple[_Cache, Tensor]:
    device = model.language_model.lm_head.weight.device
    tokens = [token for prompt in prompts for token in prompt.prompt_tokens]
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
    lengths_B = torch.tensor(lengths, dtype=torch.int64, device=device)
    ends_B = lengths_B.cumsum(0)
    row_T = torch.repeat_interleave(torch.arange(len(prompts), device=device), lengths_B)
    position_T = torch.arange(len(tokens), device=device) - (ends_B - lengths_B)[row_T]
    values = model.shape.vision.channels * model.shape.vision.patch_px**2
    patches = [np.asarray(prompt.patches_PC, dtype=np.float32).reshape(-1, values) for prompt in prompts]
    # A copy, as in training: what an answer is must not hang on where NumPy's heap had room.
    patches_PC = torch.tensor(np.concatenate([np.zeros((0, values), np.float32), *patches]), device=device)
    grids = [(int(rows), int(columns)) for prompt in prompts for rows, columns in np.asarray(prompt.grids_I2)]
    embedded_TD = model.embed(tokens_T, model.image_features(patches_PC, grids))
    documents = segments(lengths, causal=True, device=device, dtype=embedded_TD.dtype)
    heads = model.shape.decoder.heads // model.ranks.parts
    cache = _Cache(model.shape.decoder, lengths_B, places, heads=heads, like=embedded_TD)
    decoded = model.decode(
        embedded_TD, position_T, lambda layer: cache.prefill(layer, documents.attend, row_T, position_T)
    )
    return cache, decoded.hidden_TD.index_select(0, ends_B - 1)


def _until(tokens: list[int], stop_token: int) -> list[int]:
    return tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens
