"""Token cross-entropy as a sum and a count, so that normalising by the global count happens outside.

Legend: T tokens, N unmasked tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyreme_api.batch import IGNORED_TARGET

LOGITS_MAX = 1 << 28
"""Logits held at a time [scalars]; beyond it the head runs in chunks that are recomputed for the gradient."""


def token_loss(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy of unmasked targets, in float32; logits are made at unmasked positions only.

    Args:
        hidden_TD: Hidden states after the final norm.
        head_VD: Weight of the output head.
        targets_T: int64 next tokens, ``IGNORED_TARGET`` where masked.

    Returns:
        The sum (float32 scalar, with gradient) and the count (int64 scalar) of unmasked targets.
    """
    places_N = (targets_T != IGNORED_TARGET).nonzero().squeeze(1)
    hidden_ND, targets_N = hidden_TD.index_select(0, places_N), targets_T.index_select(0, places_N)
    count = torch.tensor(places_N.shape[0], device=hidden_TD.device)
    rows = max(1, LOGITS_MAX // head_VD.shape[0])
    if places_N.shape[0] <= rows:
        return _sum(hidden_ND, head_VD, targets_N), count
    chunks = zip(hidden_ND.split(rows), targets_N.split(rows), strict=True)
    sums = [checkpoint(_sum, hidden, head_VD, targets, use_reentrant=False) for hidden, targets in chunks]
    return torch.stack(sums).sum(), count


def _sum(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_ND, head_VD).float(), targets_N, reduction="sum")
