"""From the tower to the decoder: norm per patch, 2x2 pixel shuffle, two linear layers (arXiv:2504.07491, 2.1).

Legend: M merged tokens, G patches of a merged token, W tower width, D decoder width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_api.plan.shapes import ModelShape


class Projector(nn.Module):
    """``linear_2(gelu(linear_1(shuffle(norm(x)))))`` with the exact GELU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        joined = shape.vision.width * shape.vision.merge**2
        self.pre_norm = nn.LayerNorm(shape.vision.width, eps=shape.vision.norm_eps)
        self.linear_1 = nn.Linear(joined, joined)
        self.linear_2 = nn.Linear(joined, shape.decoder.width)

    def forward(self, x_MGW: Tensor) -> Tensor:
        """Return one row of the decoder's width for each merged token."""
        out_MD: Tensor = self.linear_2(F.gelu(self.linear_1(self.pre_norm(x_MGW).flatten(1))))
        return out_MD
