"""Projector from tower to decoder: norm per patch, 2x2 pixel shuffle, two linear layers (arXiv:2504.07491, 2.1).

Legend: M merged tokens of this rank, G patches of a merged token, W tower width, D decoder width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.tensor import ALONE, TensorRanks, row_product, share


class Projector(nn.Module):
    """``linear_2(gelu(linear_1(shuffle(norm(x)))))`` with the exact GELU."""

    def __init__(self, shape: ModelShape, ranks: TensorRanks = ALONE) -> None:
        """Hold this rank's inner columns.

        Raises:
            InvalidConfigError: If the ranks do not divide them.
        """
        super().__init__()
        self.ranks = ranks
        joined = shape.vision.width * shape.vision.merge**2
        inner = share(joined, ranks, what="the projector's inner width")
        self.pre_norm = nn.LayerNorm(shape.vision.width, eps=shape.vision.norm_eps)
        self.linear_1 = nn.Linear(joined, inner)
        self.linear_2 = nn.Linear(inner, shape.decoder.width)

    def forward(self, x_MGW: Tensor) -> Tensor:
        """Return one row of the decoder's width for each merged token."""
        joined = self.ranks.gather(self.pre_norm(x_MGW).flatten(1))
        return row_product(F.gelu(self.linear_1(joined)), self.linear_2, self.ranks)
