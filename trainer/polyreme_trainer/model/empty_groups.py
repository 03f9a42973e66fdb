"""Gradients of experts that got no rows: tried once at the start, since one kind of device was reported to fill them.

On Blackwell, torch's grouped product was reported to leave values in the weight gradients of empty groups that mean
nothing (pytorch#172439); on Hopper and on processors they are zero. Every step has experts without rows, and the
optimizer would follow those values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_COUNTS = (16, 0, 32, 0)
"""Rows of the groups that are tried."""
_WIDTH = 64
_TRIES = 3


def leaves_empty_groups_zero(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Try the product on a device, in memory that holds other values."""
    ends = torch.tensor(_COUNTS).cumsum(0, dtype=torch.int32).to(device)
    empty = [group for group, count in enumerate(_COUNTS) if not count]
    rows = torch.ones(sum(_COUNTS), _WIDTH, dtype=dtype, device=device)
    for _ in range(_TRIES):
        weights = torch.ones(len(_COUNTS), _WIDTH, _WIDTH, dtype=dtype, device=device, requires_grad=True)
        torch.full_like(weights, torch.nan)  # the allocator gives this memory to the gradient
        made = F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        (gradient,) = torch.autograd.grad(made, weights, torch.ones_like(made))
        if any(bool(gradient[group].ne(0).any()) for group in empty):
            return False
    return True


def without_empty_groups(weights_LFD: Tensor, counts_L: Tensor) -> Tensor:
    """Return weights whose gradient is zero for groups without rows, whatever the product makes of it."""
    cleared: Tensor = _Cleared.apply(weights_LFD, counts_L)
    return cleared


class _Cleared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_LFD: Tensor, counts_L: Tensor) -> Tensor:
        ctx.save_for_backward(counts_L)
        return weights_LFD.view_as(weights_LFD)

    @staticmethod
    def backward(ctx: Any, grad_LFD: Tensor) -> tuple[Tensor, None]:
        (counts_L,) = ctx.saved_tensors
        return grad_LFD.masked_fill((counts_L == 0).view(-1, 1, 1), 0.0), None
