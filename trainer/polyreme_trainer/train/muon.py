"""The direction of Muon: momentum, with the singular values of each matrix brought near one.

As in Moonlight (arXiv:2502.16982, section 2.2), after Jordan et al. (kellerjordan.github.io/posts/muon, 2024): the
direction times 0.2 * sqrt(max(rows, columns)), so that AdamW's learning rate and decay fit both.

A matrix is the factor of one product: fused gates and ups, and fused queries, keys and values, are separate matrices.
Embedding, head, router, position table, patch filters and all vectors stay with AdamW.

Legend: B matrices, M rows, N columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from polyreme_trainer.model.initialise import STACKED
from polyreme_trainer.model.sharding import cut_of

NOT_WHOLE = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "pos_emb.weight", "patch_embed.proj.weight")
"""Suffixes of the names of matrices that AdamW updates: their rows are entries of a table, or scores."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that is applied repeatedly: steep at zero, and near one from 0.7 to 1.2."""
ITERATIONS = 5
SCALE = 0.2
"""Root mean square of an update: about AdamW's."""
AT_ONCE_SCALARS = 1 << 26
"""Scalars that are made orthogonal at a time, of each of four tensors."""
_TINY = 1e-7


def whole_names(named: Iterable[tuple[str, tuple[int, ...]]]) -> frozenset[str]:
    """Return the names of those parameters that are matrices or stacks of matrices."""
    return frozenset(
        name for name, shape in named if not name.endswith(NOT_WHOLE) and (len(shape) == 2 or name.endswith(STACKED))
    )


def matrices_of(name: str, whole: Tensor) -> Tensor:
    """View a whole parameter as its matrices (B, M, N)."""
    cut = cut_of(name)
    fused = 2 if name.endswith("gate_up_proj") else 1 if cut is None else cut.blocks
    rows, columns = whole.shape[-2:]
    return whole.view(-1, rows // fused, columns)


def step_size(rows: int, columns: int) -> float:
    """Factor of a direction, without the learning rate."""
    return SCALE * math.sqrt(max(rows, columns))


def orthogonal(given_BMN: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bring the singular values of each matrix near one, by Newton and Schulz; a matrix of zeros stays zero.

    Args:
        given_BMN: float32 matrices.
        dtype: Type of the products: bfloat16 is enough for a direction, and float32 gives all layouts the same one.

    Returns:
        float32 matrices of the same shape.
    """
    size = max(1, AT_ONCE_SCALARS // max(1, given_BMN[0].numel() if given_BMN.shape[0] else 1))
    return torch.cat([_orthogonal(part_BMN, dtype) for part_BMN in given_BMN.split(size)])


def _orthogonal(given_BMN: Tensor, dtype: torch.dtype) -> Tensor:
    tall = given_BMN.shape[1] > given_BMN.shape[2]
    length_B11 = given_BMN.square().sum((1, 2), keepdim=True).sqrt_()
    x_BMN = (given_BMN / (length_B11 + _TINY)).to(dtype)
    x_BMN = x_BMN.mT if tall else x_BMN
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square_BMM = torch.bmm(x_BMN, x_BMN.mT)
        factor_BMM = torch.baddbmm(square_BMM, square_BMM, square_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, factor_BMM, x_BMN, beta=a)
    return (x_BMN.mT if tall else x_BMN).float()
