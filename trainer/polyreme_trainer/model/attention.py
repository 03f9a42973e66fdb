"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values come from one small latent.

Parameter names are those of the Kimi-VL checkpoints. The rotated part of the key is shared by all heads.
Tensor-parallel ranks share the heads; queries' inputs and latents are gathered in one exchange.

Legend: T tokens, S those of this rank between layers (all of them without tensor parallelism), D model width, H heads
of this rank, N width without rotation, R rotated width, Q = N + R, V value width, C latent width, X = C + R, W = N + V.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.model.recompute import recomputable
from polyreme_trainer.model.rotary import rotate, yarn_scale
from polyreme_trainer.model.segment_attention import Attend
from polyreme_trainer.model.tensor import ALONE, TensorRanks, gather_side_by_side, row_product, share

LATENT_NORM_EPS = 1e-6
"""The released models normalise latents with the default epsilon of their norm class, not with ``rms_norm_eps``."""


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467); statistics in float32 whatever the input type.

    An accelerator has one kernel for it. On CPU torch composes it of six operations, and keeps the inputs of each of
    them; ours keeps the input and one number per row, and takes two thirds of the time.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        """Divide each row by its root mean square, then scale by the weight."""
        if x_TD.device.type != "cpu":
            return F.rms_norm(x_TD, self.weight.shape, self.weight, self.eps)
        normed_TD: Tensor = _RMSNorm.apply(x_TD, self.weight, self.eps)
        return normed_TD


class _RMSNorm(torch.autograd.Function):
    """``x * rsqrt(mean(x ** 2) + eps) * weight``."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale_T1 = x_TD.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return (x_TD.float() * scale_T1).mul_(weight_D).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        dtype, weight_dtype = x_TD.dtype, weight_D.dtype
        grad_TD, x_TD, weight_D = grad_TD.float(), x_TD.float(), weight_D.float()
        by_x_TD = grad_TD * x_TD
        along_T1 = torch.mv(by_x_TD, weight_D).unsqueeze(1).mul_(scale_T1**3).div_(x_TD.shape[1])
        grad_x_TD = (grad_TD * weight_D).mul_(scale_T1).addcmul_(x_TD, along_T1, value=-1)
        # Not a product with a vector, which adds rows sequentially: a sum of a thousand rows loses 3e-6.
        grad_weight_D = by_x_TD.mul_(scale_T1).sum(0)
        return grad_x_TD.to(dtype), grad_weight_D.to(weight_dtype), None


class LatentAttend(abc.ABC):
    """Attention that keeps latents for later tokens, in place of the keys and values of all heads."""

    @abc.abstractmethod
    def attend(self, attention: LatentAttention, q_THQ: Tensor, latent_TX: Tensor) -> Tensor:
        """Return (T, H, V).

        Args:
            attention: The layer, for its projections of latents.
            q_THQ: Rotated queries.
            latent_TX: Normalised latent of each token, then the rotated part of its key.
        """


class LatentAttention(nn.Module):
    """MLA with or without query compression (``q_rank``); the caller's ``attend`` decides which tokens see which."""

    def __init__(self, shape: DecoderShape, ranks: TensorRanks = ALONE) -> None:
        """Hold this rank's heads.

        Raises:
            InvalidConfigError: If the ranks do not divide the heads.
        """
        super().__init__()
        self.shape = shape
        self.ranks = ranks
        self.heads = share(shape.heads, ranks, what="the decoder's heads")
        self.query_scale = yarn_scale(shape, shape.yarn_mscale_all_dim) ** 2
        """Growth of the scores under YaRN, applied to queries, since every kernel divides by the root of their
        width."""
        queries = self.heads * shape.query_dim
        if shape.q_rank is None:
            self.q_proj = nn.Linear(shape.width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(shape.width, shape.q_rank, bias=False)
            self.q_a_layernorm = RMSNorm(shape.q_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(shape.q_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.width, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(shape.kv_rank, self.heads * (shape.nope_dim + shape.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * shape.value_dim, shape.width, bias=False)

    def forward(self, x_SD: Tensor, turn_TF: Tensor, attend: Attend | LatentAttend) -> Tensor:
        """Project, attend, project back.

        Args:
            x_SD: Normalised hidden states.
            turn_TF: Rotation of each token (``rotary.decoder_turns``).
            attend: Attention among the tokens that see each other.
        """
        shape = self.shape
        latent_SC, k_SR = self.kv_a_proj_with_mqa(x_SD).split((shape.kv_rank, shape.rope_dim), dim=-1)
        asked_SD = x_SD if shape.q_rank is None else recomputable(self.q_a_layernorm, self.q_a_proj(x_SD))
        latent_SC = recomputable(self.kv_a_layernorm, latent_SC)
        asked_TD, latent_TC, k_TR = gather_side_by_side((asked_SD, latent_SC, k_SR), self.ranks)
        query = self.q_proj if shape.q_rank is None else self.q_b_proj
        q_THQ = query(asked_TD).unflatten(-1, (self.heads, shape.query_dim))
        q_THN, q_THR = q_THQ.split((shape.nope_dim, shape.rope_dim), dim=-1)
        q_THQ = torch.cat((q_THN, rotate(q_THR, turn_TF)), dim=-1)
        if self.query_scale != 1:
            q_THQ = q_THQ * self.query_scale
        if isinstance(attend, LatentAttend):
            latent_TX = torch.cat((latent_TC, rotate(k_TR.unsqueeze(1), turn_TF).squeeze(1)), dim=-1)
            o_THV = attend.attend(self, q_THQ, latent_TX)
        else:
            kv_THW = recomputable(self.kv_b_proj, latent_TC).unflatten(-1, (self.heads, -1))
            k_THN, v_THV = kv_THW.split((shape.nope_dim, shape.value_dim), dim=-1)
            o_THV = attend(q_THQ, recomputable(_keys, k_THN, k_TR, turn_TF), v_THV)
        return row_product(o_THV.flatten(1), self.o_proj, self.ranks)

    def expand(self, latent_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (T, H, Q) and values (T, H, V) of latents with their rotated keys."""
        latent_TC, k_TR = latent_TX.split((self.shape.kv_rank, self.shape.rope_dim), dim=-1)
        kv_THW = self.kv_b_proj(latent_TC).unflatten(-1, (self.heads, -1))
        k_THN, v_THV = kv_THW.split((self.shape.nope_dim, self.shape.value_dim), dim=-1)
        return torch.cat((k_THN, k_TR.unsqueeze(1).expand(-1, self.heads, -1)), dim=-1), v_THV

    def absorbed(self) -> tuple[Tensor, Tensor]:
        """Return what turns a latent into each head's keys (H, N, C) and values (H, V, C)."""
        projection = self.kv_b_proj
        if isinstance(projection, nn.Linear):
            weight_WC = projection.weight
        else:  # with an adapter beside it, say: what it makes of each axis
            first = next(projection.parameters())
            weight_WC = projection(torch.eye(self.shape.kv_rank, dtype=first.dtype, device=first.device)).T
        keys_HNC, values_HVC = weight_WC.unflatten(0, (self.heads, -1)).split(
            (self.shape.nope_dim, self.shape.value_dim), dim=1
        )
        return keys_HNC, values_HVC


def _keys(k_THN: Tensor, k_TR: Tensor, turn_TF: Tensor) -> Tensor:
    """Append the rotated part, which all heads share, to each head's own."""
    k_THR = rotate(k_TR.unsqueeze(1), turn_TF).expand(-1, k_THN.shape[1], -1)
    return torch.cat((k_THN, k_THR), dim=-1)
