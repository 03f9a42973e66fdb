"""Branches of a stream: several answers to one prompt, in one document.

The score of a branch is the sum of the log-probabilities of its tokens, in float64: with 2,048 of them a float32 sum is
off by more than the differences that matter. Ranks that share a stream hold some tokens of a branch each, and add up
one number a branch.

Legend: N unmasked targets of this rank, B branches of the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The branches of a stream, and which tokens of this rank they have."""

    branch_N: Tensor
    """int64 number of the branch of each unmasked target."""
    tokens_B: Tensor
    """Unmasked targets of each branch, of all ranks that share the stream (float64)."""
    reference_B: Tensor
    """Stored score of each branch under the reference (float64)."""
    speaks: bool = True
    """Whether this rank reports the loss of the stream, which others may share."""
    add_up: Callable[[Tensor], None] = lambda _: None
    """Sums numbers over the ranks that share the stream, in place."""

    @property
    def count(self) -> int:
        """Branches of the stream."""
        return int(self.tokens_B.shape[0])

    def scores(self, logp_N: Tensor) -> Tensor:
        """Sum log-probabilities by branch, over all ranks that share the stream (B, float64)."""
        scores_B = torch.zeros_like(self.tokens_B).index_add_(0, self.branch_N, logp_N.double())
        self.add_up(scores_B)
        return scores_B
