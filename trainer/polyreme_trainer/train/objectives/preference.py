"""Preference between two answers to one prompt, without a reward model (DPO, arXiv:2305.18290).

Branches come in pairs: the chosen answer, then the rejected one. The margin of a pair is how much more the model
prefers the chosen answer than the reference does::

    margin = (s_c - ref_c) - (s_r - ref_r)      s: sum of the log-probabilities of an answer's tokens
    Sigmoid      -log sigmoid(beta margin)
    SigmoidNorm  the same, with every s and ref divided by the tokens of its answer
    IPO          (margin - 1 / (2 beta))^2, also by tokens (arXiv:2310.12036; its authors divide by the length)

With label smoothing e, a pair is taken to be the wrong way round with probability e: ``(1 - e) f(margin) + e
f(-margin)``. A supervised term adds the mean cross-entropy of the chosen answer's tokens, so that its probability does
not fall together with the rejected one's.

Legend: N unmasked targets of this rank, B branches, P pairs, M metrics.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme_api.job.objective import Objective as Field
from polyreme_trainer.model.branches import Branches
from polyreme_trainer.train.objectives.objective import Weighed, weighed_by_scores

METRICS = ("rewardMargin", "pairAccuracy", "rewardChosen", "rewardRejected", "referenceDrift")
"""The first ones are shown while the run trains."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The loss of pairs; its metrics are means over pairs.

    Rewards are ``beta (s - ref)``; a pair is accurate if its margin is above zero; the drift is the mean distance of
    log-probabilities to the reference's over both answers [nats a token].
    """

    beta: float
    by_tokens: bool = False
    squared: bool = False
    label_smoothing: float = 0.0
    supervised_weight: float = 0.0

    @classmethod
    def of(cls, field: Field) -> Preference:
        """Take what a job says."""
        return cls(
            beta=float(field.beta),
            by_tokens=field.loss != "Sigmoid",
            squared=field.loss == "IPO",
            label_smoothing=float(field.label_smoothing),
            supervised_weight=float(field.supervised_weight),
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is measured."""
        return METRICS

    @property
    def temperature(self) -> float:
        """Answers of data are scored as they are."""
        return 1.0

    def counted(self, branches: Branches) -> int:
        """Return the pairs."""
        return branches.count // 2 if branches.speaks else 0

    def weigh(self, logp_N: Tensor, branches: Branches) -> Weighed:
        """Weigh the tokens of pairs."""
        return weighed_by_scores(self.loss, logp_N, branches)

    def loss(self, scores_B: Tensor, branches: Branches) -> tuple[Tensor, Tensor]:
        """Sum the loss of pairs, and their metrics (M)."""
        moved_B = scores_B - branches.reference_B
        measured_B = moved_B / branches.tokens_B if self.by_tokens else moved_B
        margin_P = measured_B[0::2] - measured_B[1::2]
        loss = self._of_margins(margin_P).sum()
        if self.supervised_weight:
            loss = loss - self.supervised_weight * (scores_B / branches.tokens_B)[0::2].sum()
        drift_B = moved_B.abs() / branches.tokens_B
        measured = [
            self.beta * margin_P.sum(),
            (margin_P > 0).sum().to(margin_P.dtype),
            self.beta * measured_B[0::2].sum(),
            self.beta * measured_B[1::2].sum(),
            drift_B.sum() / 2,
        ]
        return loss, torch.stack(measured)

    def _of_margins(self, margin_P: Tensor) -> Tensor:
        if self.squared:
            return (margin_P - 1 / (2 * self.beta)).square()
        right_P = -F.logsigmoid(self.beta * margin_P)
        if not self.label_smoothing:
            return right_P
        wrong_P = -F.logsigmoid(-self.beta * margin_P)
        return (1 - self.label_smoothing) * right_P + self.label_smoothing * wrong_P
