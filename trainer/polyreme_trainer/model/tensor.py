"""Interface of a layer to tensor parallelism with sequence parallelism (arXiv:2205.05198): rows in, rows out.

The ranks of a tensor-parallel group share each layer's heads and inner columns. Between the shared products every rank
holds only a part of the rows: norms, router and residuals are computed once. So a shared layer gathers rows, multiplies
by its own columns, then by its own rows of the second matrix, and the sum over ranks is scattered back.

Every gradient of a parameter that is held whole is then partial on each rank: of its own rows, or of its own heads.

Legend: T rows of the whole stream, S rows of this rank, X any width, F inner columns of this rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError


class TensorRanks(Protocol):
    """The ranks that share a layer; every rank of the group makes the same calls in the same order."""

    @property
    def parts(self) -> int:
        """Ranks of the group."""
        ...

    @property
    def place(self) -> int:
        """Number of this rank in the group."""
        ...

    @property
    def row_parts(self) -> int:
        """Parts into which rows are cut between layers: all ranks, or 1 if each rank holds all rows."""
        ...

    def gather(self, x_SX: Tensor) -> Tensor:
        """Join the equal row parts of all ranks, in order; the gradient is summed over ranks and scattered."""
        ...

    def scatter(self, x_TX: Tensor) -> Tensor:
        """Sum over ranks and keep this rank's rows; the gradient is gathered."""
        ...

    def own_rows(self, rows: int) -> slice:
        """Which of T rows this rank holds between layers.

        Raises:
            InvalidConfigError: If the rows cannot be split evenly.
        """
        ...

    def total(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same on all of them; without gradient."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Largest over ranks, element by element; without gradient."""
        ...


class Alone:
    """One rank holds everything: implements ``TensorRanks`` by doing nothing."""

    parts = 1
    place = 0
    row_parts = 1

    def gather(self, x_SX: Tensor) -> Tensor:
        """Return the rows as they are."""
        return x_SX

    def scatter(self, x_TX: Tensor) -> Tensor:
        """Return the rows as they are."""
        return x_TX

    def own_rows(self, rows: int) -> slice:
        """All rows."""
        return slice(0, rows)

    def total(self, x: Tensor) -> Tensor:
        """Return the value as it is."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Return the value as it is."""
        return x


ALONE = Alone()


def share(whole: int, ranks: TensorRanks, *, what: str) -> int:
    """Return this rank's part of a count that the ranks share evenly.

    Raises:
        InvalidConfigError: If it does not divide.
    """
    if whole % ranks.parts:
        raise InvalidConfigError(
            f"layout does not fit: tp={ranks.parts} must divide {what} ({whole})", field="spec.parallelism.tp"
        )
    return whole // ranks.parts


def gather_side_by_side(parts: tuple[Tensor, ...], ranks: TensorRanks) -> tuple[Tensor, ...]:
    """Gather the rows of several tensors in one exchange."""
    if ranks.parts == 1:
        return parts
    gathered: Tensor = ranks.gather(torch.cat(parts, dim=-1))
    apart: tuple[Tensor, ...] = gathered.split([part.shape[-1] for part in parts], dim=-1)
    return apart


def row_product(x_TF: Tensor, linear: nn.Linear, ranks: TensorRanks) -> Tensor:
    """Multiply by a matrix whose inputs the ranks share: sum over ranks, keep this rank's rows, then add the bias."""
    if ranks.parts == 1:
        out: Tensor = linear(x_TF)
        return out
    bias: Tensor | None = linear.bias
    if bias is None:
        return ranks.scatter(linear(x_TF))
    return ranks.scatter(F.linear(x_TF, linear.weight)) + bias
