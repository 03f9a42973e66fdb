"""Rotary position embedding by complex numbers: one multiplication turns queries and keys.

Pairs are interleaved, ``(x0, x1), (x2, x3), ...``, as DeepSeek-V3 and MoonViT lay them out (arXiv:2104.09864).

Legend: T tokens or patches, H heads, Q width of a head, F = Q / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_THQ: Tensor, turn_TF: Tensor) -> Tensor:
    """Turn every interleaved pair of ``x_THQ`` by the complex unit number of its position, in float32."""
    pairs_THF = torch.view_as_complex(x_THQ.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_THF * turn_TF.unsqueeze(1)).flatten(-2).to(x_THQ.dtype)


def decoder_turns(positions_T: Tensor, *, rope_dim: int, theta: float) -> Tensor:
    """Turns of a decoder's tokens: pair i of position p turns by ``p * theta**(-2i / rope_dim)``.

    Returns:
        complex64, (T, rope_dim / 2).
    """
    exponents_F = torch.arange(0, rope_dim, 2, device=positions_T.device, dtype=torch.float32) / rope_dim
    angles_TF = torch.outer(positions_T.float(), theta**-exponents_F)
    return torch.polar(torch.ones_like(angles_TF), angles_TF)


def patch_turns(row_P: Tensor, column_P: Tensor, *, head_dim: int, theta: float) -> Tensor:
    """Turns of MoonViT's patches: pair 2k by the column, pair 2k + 1 by the row, times ``theta**(-4k / head_dim)``.

    Returns:
        complex64, (P, head_dim / 2).
    """
    exponents_K = torch.arange(0, head_dim, 4, device=row_P.device, dtype=torch.float32) / head_dim
    frequencies_K = theta**-exponents_K
    place_P12 = torch.stack((column_P, row_P), dim=-1).float().unsqueeze(1)
    angles_PF = (place_P12 * frequencies_K.unsqueeze(1)).flatten(1)
    return torch.polar(torch.ones_like(angles_PF), angles_PF)
