"""Branches of a stream: several answers to one prompt, in one document.

The score of a branch is the sum of the log-probabilities of its tokens, in float64: with 2,048 of them a float32 sum is
off by more than the differences that matter. Ranks that share a stream hold some tokens of a branch each, and add up
one number a branch.

Legend: N unmasked targets of this rank, B branches of the stream, K those that are learned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

StoredScores = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""Source and place of each branch's sample ``[B, 2]`` -> the branch's stored score (B); NaN: it has none."""


def not_yet(samples_B2: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return zeros, for scores that the step itself computes."""
    return np.zeros(len(samples_B2))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Answers that the model has drawn itself; float64."""

    log_prob_N: Tensor
    """Log-probability of each target when it was drawn."""
    advantage_B: Tensor
    """How much better an answer is than the others to its prompt."""
    share_B: Tensor
    """What each token of an answer counts in a mean over the answers of the step."""
    reference_N: Tensor | None = None
    """Log-probability of each target under the reference; None: it is not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The branches of a stream, and which tokens of this rank they have."""

    branch_N: Tensor
    """int64 number of the branch of each unmasked target."""
    tokens_B: Tensor
    """Unmasked targets of each branch, of all ranks that share the stream (float64)."""
    reference_B: Tensor
    """Score of each branch under the reference (float64)."""
    known_K: Tensor | None = None
    """Branches that have a stored score, rising; None: all. The others are not learned: they could not be read when
    the reference was scored."""
    drawn: Drawn | None = None
    """None: they are of the data."""
    speaks: bool = True
    """Whether this rank reports the loss of the stream, which others may share."""
    add_up: Callable[[Tensor], None] = lambda _: None
    """Sums numbers over the ranks that share the stream, in place."""

    @property
    def count(self) -> int:
        """Branches of the stream that are learned."""
        return int((self.tokens_B if self.known_K is None else self.known_K).shape[0])

    def known(self) -> Branches:
        """Return the branches that are learned; the tokens of the others have none there."""
        if self.known_K is None:
            return self
        tokens_B, reference_B = self.tokens_B[self.known_K], self.reference_B[self.known_K]
        return dataclasses.replace(self, tokens_B=tokens_B, reference_B=reference_B, known_K=None)

    def scores(self, logp_N: Tensor) -> Tensor:
        """Sum log-probabilities by branch, over all ranks that share the stream (B, float64)."""
        scores_B = torch.zeros_like(self.tokens_B).index_add_(0, self.branch_N, logp_N.double())
        self.add_up(scores_B)
        return scores_B
