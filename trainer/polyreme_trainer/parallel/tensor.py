"""Gathers, scatters and sums of rows in a tensor-parallel group: implements the model's ``TensorRanks``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.model.tensor import TensorRanks
from polyreme_trainer.parallel import collectives


class TensorGroup:
    """The ranks of a tensor-parallel group, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.parts = dist.get_world_size(group)
        self.place = dist.get_rank(group)
        self.holds_whole_rows = False
        """Whether every rank holds all rows between layers."""

    @property
    def row_parts(self) -> int:
        """Parts into which rows are cut between layers."""
        return 1 if self.holds_whole_rows else self.parts

    def gather(self, x_SX: Tensor) -> Tensor:
        """Join the row parts of all ranks."""
        return x_SX if self.holds_whole_rows else collectives.gather_rows(x_SX, self._group)

    def scatter(self, x_TX: Tensor) -> Tensor:
        """Sum over ranks and keep this rank's rows."""
        return self.total(x_TX) if self.holds_whole_rows else collectives.scatter_rows(x_TX, self._group)

    def own_rows(self, rows: int) -> slice:
        """Return which of the rows this rank holds between layers.

        Raises:
            InvalidConfigError: If the ranks do not divide the rows.
        """
        if self.holds_whole_rows:
            return slice(0, rows)
        if rows % self.parts:
            raise InvalidConfigError(
                f"tokens do not fit the layout: tp={self.parts} must divide the {rows} tokens of a context rank",
                field="spec.data.sequenceTokens",
            )
        share = rows // self.parts
        return slice(self.place * share, (self.place + 1) * share)

    def total(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        summed = x.detach().clone()
        collectives.sum_over(summed, self._group)
        return summed

    def largest(self, x: Tensor) -> Tensor:
        """Largest over ranks."""
        found = x.detach().clone()
        collectives.largest_over(found, self._group)
        return found


@contextlib.contextmanager
def whole_rows(ranks: TensorRanks) -> Iterator[None]:
    """Let every rank hold all rows between layers while the block runs, for decoding any number of rows.

    Without gradient: a sum over ranks takes the place of every exchange.
    """
    if not isinstance(ranks, TensorGroup):
        yield
        return
    ranks.holds_whole_rows = True
    try:
        yield
    finally:
        ranks.holds_whole_rows = False
