"""Rotary position embedding by complex numbers: one multiplication rotates queries and keys.

Pairs are interleaved, ``(x0, x1), (x2, x3), ...``, as in DeepSeek-V3 and MoonViT (arXiv:2104.09864). YaRN
(arXiv:2309.00071) slows down the pairs with low frequencies, so that positions beyond the trained ones look like those.

Legend: T tokens or patches, H heads, Q width of a head, F = Q / 2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyreme_planner.shapes import DecoderShape


def rotate(x_THQ: Tensor, turn_TF: Tensor) -> Tensor:
    """Rotate every interleaved pair of ``x_THQ`` by the complex unit number of its position, in float32."""
    pairs_THF = torch.view_as_complex(x_THQ.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_THF * turn_TF.unsqueeze(1)).flatten(-2).to(x_THQ.dtype)


def decoder_turns(positions_T: Tensor, shape: DecoderShape, *, theta: float) -> Tensor:
    """Rotations of a decoder's tokens: pair i of position p by ``p * theta**(-2i / rope_dim)``, or by YaRN's angles.

    Args:
        positions_T: Positions within each document.
        shape: Rotated width, and YaRN's numbers.
        theta: Base of the positions, which a curriculum stage may change.

    Returns:
        complex64, (T, rope_dim / 2); of length one, except if YaRN's two scales differ.
    """
    exponents_F = torch.arange(0, shape.rope_dim, 2, device=positions_T.device, dtype=torch.float32) / shape.rope_dim
    frequencies_F = theta**-exponents_F
    if shape.yarn_factor > 1:
        slowed_F = _yarn_ramp(shape, theta, positions_T.device)
        frequencies_F = frequencies_F / shape.yarn_factor * slowed_F + frequencies_F * (1 - slowed_F)
    angles_TF = torch.outer(positions_T.float(), frequencies_F)
    length = yarn_scale(shape, shape.yarn_mscale) / yarn_scale(shape, shape.yarn_mscale_all_dim)
    return torch.polar(torch.full_like(angles_TF, length), angles_TF)


def yarn_scale(shape: DecoderShape, weight: float) -> float:
    """Return how much longer positions scale attention (arXiv:2309.00071, section 3.4); 1 without YaRN."""
    return 0.1 * weight * math.log(shape.yarn_factor) + 1.0


def _yarn_ramp(shape: DecoderShape, theta: float, device: torch.device) -> Tensor:
    """Return how much each pair is slowed, relative to the factor: 0 at high frequencies, 1 at low ones."""

    def pair_that_turns(times: float) -> float:
        wavelength = shape.yarn_positions / (times * 2 * math.pi)
        return shape.rope_dim * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(shape.yarn_beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(shape.yarn_beta_slow)), shape.rope_dim - 1)
    # If both bounds are one pair, the released implementation leaves a step of this width.
    width = last - first or 0.001
    pairs_F = torch.arange(shape.rope_dim // 2, device=device, dtype=torch.float32)
    return ((pairs_F - first) / width).clamp(0, 1)


def patch_turns(row_P: Tensor, column_P: Tensor, *, head_dim: int, theta: float) -> Tensor:
    """Rotations of MoonViT's patches: pair 2k by the column, pair 2k + 1 by the row, times ``theta**(-4k / head_dim)``.

    Returns:
        complex64, (P, head_dim / 2).
    """
    exponents_K = torch.arange(0, head_dim, 4, device=row_P.device, dtype=torch.float32) / head_dim
    frequencies_K = theta**-exponents_K
    place_P12 = torch.stack((column_P, row_P), dim=-1).float().unsqueeze(1)
    angles_PF = (place_P12 * frequencies_K.unsqueeze(1)).flatten(1)
    return torch.polar(torch.ones_like(angles_PF), angles_PF)
