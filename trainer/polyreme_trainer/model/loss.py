"""Token cross-entropy as a sum and a count, so that normalising by the global count happens outside.

Tensor-parallel ranks share the vocabulary: each scores its words for all tokens, and three numbers a token are all that
they exchange.

Legend: T tokens, S those of this rank between layers, N unmasked tokens, D width, V words of this rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyreme_api.batch import IGNORED_TARGET
from polyreme_trainer.model.tensor import ALONE, TensorRanks

LOGITS_MAX = 1 << 28
"""Logits held at a time [scalars]; beyond it the head runs in chunks that are recomputed for the gradient."""


def token_loss(
    hidden_SD: Tensor, head_VD: Tensor, targets_T: Tensor, ranks: TensorRanks = ALONE
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy of unmasked targets, in float32; logits are made at unmasked positions only.

    Args:
        hidden_SD: Hidden states after the final norm.
        head_VD: This rank's words of the output head's weight.
        targets_T: int64 next tokens, ``IGNORED_TARGET`` where masked.
        ranks: The ranks that share the vocabulary.

    Returns:
        The sum (float32 scalar, with gradient) and the count (int64 scalar) of unmasked targets, of all words: the same
        on all ranks that share them, so one of them speaks for all.
    """
    hidden_TD = ranks.gather(hidden_SD)
    places_N = (targets_T != IGNORED_TARGET).nonzero().squeeze(1)
    hidden_ND, targets_N = hidden_TD.index_select(0, places_N), targets_T.index_select(0, places_N)
    count = torch.tensor(places_N.shape[0], device=hidden_TD.device)
    rows = max(1, LOGITS_MAX // head_VD.shape[0])
    if places_N.shape[0] <= rows:
        return _sum(hidden_ND, head_VD, targets_N, ranks), count
    chunks = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
    sums = [checkpoint(_sum, hidden, head_VD, targets, ranks, use_reentrant=False) for hidden, targets in chunks]
    return torch.stack(sums).sum(), count


def _sum(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, ranks: TensorRanks) -> Tensor:
    logits_NV = F.linear(hidden_ND, head_VD).float()
    if ranks.parts == 1:
        return F.cross_entropy(logits_NV, targets_N, reduction="sum")
    return cast("Tensor", _SharedCrossEntropy.apply(logits_NV, targets_N, ranks))


class _SharedCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy where each rank holds the logits of some words (arXiv:1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, ranks: TensorRanks) -> Tensor:
        words = logits_NV.shape[1]
        own_N = targets_N - ranks.place * words
        held_N = (own_N >= 0) & (own_N < words)
        own_N = own_N.clamp(0, words - 1)
        largest_N = ranks.largest(logits_NV.amax(1))
        shifted_NV = logits_NV - largest_N.unsqueeze(1)
        target_N = shifted_NV.gather(1, own_N.unsqueeze(1)).squeeze(1) * held_N
        exponential_NV = shifted_NV.exp_()
        total_N, target_N = ranks.total(torch.stack((exponential_NV.sum(1), target_N)))
        share_NV = exponential_NV.div_(total_N.unsqueeze(1))
        ctx.save_for_backward(share_NV, own_N, held_N)
        losses_N: Tensor = total_N.log() - target_N
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        share_NV, own_N, held_N = ctx.saved_tensors
        grad_NV = share_NV.scatter_add(1, own_N.unsqueeze(1), -held_N.to(share_NV.dtype).unsqueeze(1))
        return grad_NV * grad, None, None
