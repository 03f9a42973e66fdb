"""Objective of a stage: what the log-probabilities of answers are worth, and the weights of tokens that follow.

The gradient of a token is that of its cross-entropy, times its weight: the negative slope of the loss by its
log-probability.

Legend: N unmasked targets of this rank, B branches of the stream, M metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from polyreme_trainer.model.branches import Branches, StoredScores
from polyreme_trainer.model.loss import Weigh


class Weighed(NamedTuple):
    """The targets of a rank, weighed; sums over what is counted."""

    loss: Tensor
    """Scalar."""
    weights_N: Tensor
    """Float32."""
    measured_M: Tensor
    """Sums of the metrics."""


class Objective(Protocol):
    """What a stage optimises."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of what it measures, beside the loss: means over what is counted."""
        ...

    @property
    def temperature(self) -> float:
        """Number that logits are divided by before they become probabilities."""
        ...

    def counted(self, branches: Branches) -> int:
        """Return what this rank adds to the number that the loss is divided by."""
        ...

    def weigh(self, logp_N: Tensor, branches: Branches) -> Weighed:
        """Weigh targets by their log-probabilities (float32), on each rank that holds some of the stream."""
        ...


def weighed_by_scores(
    loss: Callable[[Tensor, Branches], tuple[Tensor, Tensor]], logp_N: Tensor, branches: Branches
) -> Weighed:
    """Weigh by a loss of whole branches: all tokens of one weigh the same.

    Args:
        loss: Of the scores of the branches that are learned: the loss (scalar) as a sum over what is counted, and the
            sums of the metrics (M). Only the loss is differentiated, by torch, so an objective is written as its paper
            has it.
        logp_N: As in ``Objective.weigh``.
        branches: As there.
    """
    scores_B = branches.scores(logp_N)
    with torch.enable_grad():
        scores_B.requires_grad_()
        scores_K = scores_B if branches.known_K is None else scores_B[branches.known_K]
        total, measured_M = loss(scores_K, branches.known())
        (slope_B,) = torch.autograd.grad(total, scores_B)
    return Weighed(
        total.detach().float() * branches.speaks,
        -slope_B.float().index_select(0, branches.branch_N),
        measured_M.detach() * branches.speaks,
    )


class Weigher:
    """Weighs the tokens of a stage's microbatches by its objective, and adds up what that measures."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.reference: StoredScores | None = None
        """Scores under the reference; None: not yet."""
        self.held_out: StoredScores | None = None
        """The same of held-out pairs, whose source is the number of their set."""
        self._measured_M: Tensor | None = None

    def weigh(self, branches: Branches | None) -> Weigh:
        """Return how the tokens of a stream are weighed; one without branches has nothing to learn."""
        if branches is None:
            return lambda logp_N: (logp_N.new_zeros(()), torch.zeros_like(logp_N))

        def weighed(logp_N: Tensor) -> tuple[Tensor, Tensor]:
            loss, weights_N, measured_M = self.objective.weigh(logp_N.detach(), branches)
            self._measured_M = measured_M if self._measured_M is None else self._measured_M + measured_M
            return loss, weights_N

        return weighed

    def take(self) -> Tensor | None:
        """Return the sums of the metrics since the last call (M); None where nothing was weighed."""
        measured_M, self._measured_M = self._measured_M, None
        return measured_M
