"""Objective of a stage: a pure function of the scores of answers, and the weights of tokens that follow from it.

The gradient of a token is that of its cross-entropy, times the loss's slope by the score of its branch.

Legend: N unmasked targets of this rank, B branches of the stream, M metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from polyreme_trainer.model.branches import Branches, StoredScores
from polyreme_trainer.model.loss import Weigh


class Objective(Protocol):
    """What a stage optimises."""

    @property
    def metrics(self) -> Sequence[str]:
        """Names of what it measures, beside the loss: means over what is counted."""
        ...

    def counted(self, branches: int) -> int:
        """Return what the loss of so many branches is divided by."""
        ...

    def loss(self, scores_B: Tensor, branches: Branches) -> tuple[Tensor, Tensor]:
        """Return the loss (scalar) as a sum over what is counted, and the sums of the metrics (M).

        Only the loss is differentiated, by torch, so an objective is written as its paper has it.
        """
        ...


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
            scores_B = branches.scores(logp_N.detach())
            known_K = branches.known_K
            with torch.enable_grad():
                scores_B.requires_grad_()
                scores_K = scores_B if known_K is None else scores_B[known_K]
                loss, measured_M = self.objective.loss(scores_K, branches.known())
                (slope_B,) = torch.autograd.grad(loss, scores_B)
            measured_M = measured_M.detach() * branches.speaks
            self._measured_M = measured_M if self._measured_M is None else self._measured_M + measured_M
            return loss.detach().float() * branches.speaks, -slope_B.float().index_select(0, branches.branch_N)

        return weighed

    def take(self) -> Tensor | None:
        """Return the sums of the metrics since the last call (M); None where nothing was weighed."""
        measured_M, self._measured_M = self._measured_M, None
        return measured_M
