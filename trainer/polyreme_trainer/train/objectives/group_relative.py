"""The model's own answers, better ones above worse ones of the same prompt (GRPO, arXiv:2402.03300).

The advantage of an answer is its reward less the mean of its prompt's answers. With ``rho`` the ratio of a token's
probability to the one before the update, which is 1 since each step's answers are learned once::

    loss = mean(-c rho advantage + kl (log p - log p_ref)^2 / 2)

``c`` corrects what generation and training compute unlike: the ratio of their probabilities of the token (``Token``)
or of the answer (``Sequence``), at most a limit (truncated importance sampling). The distance to the reference is k2
(J. Schulman, 2020): its gradient is that of the divergence, which those of k1 and k3 as loss terms are not.

Which mean it is, over the tokens of the step or of each answer first, is in the answers' shares.

Legend: N unmasked targets of this rank, B branches of the stream, M metrics.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from polyreme_api.job.objective import Objective as Field
from polyreme_trainer.model.branches import Branches
from polyreme_trainer.train.objectives.objective import Weighed

METRICS = ("mismatch", "referenceDistance")
LOG_RATIO_MAX = 20.0
"""Largest logarithm of a ratio, so that no weight overflows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """The loss of answers.

    Its metrics are means over answers: how far log-probabilities are from those of the generation, and the distance to
    the reference [nats a token].
    """

    correction: str = "Token"
    correction_limit: float = 2.0
    kl: float = 0.0
    temperature: float = 1.0

    @classmethod
    def of(cls, field: Field) -> GroupRelative:
        """Take what a job says."""
        return cls(
            correction=field.correction,
            correction_limit=float(field.correction_limit),
            kl=float(field.kl),
            temperature=float(field.temperature),
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what is measured."""
        return METRICS

    def counted(self, branches: Branches) -> int:
        """Return the answers."""
        return branches.count if branches.speaks else 0

    def weigh(self, logp_N: Tensor, branches: Branches) -> Weighed:
        """Weigh the tokens of answers."""
        drawn, branch_N = branches.drawn, branches.branch_N
        assert drawn is not None  # every stream of the stage has been rolled out
        share_N, moved_N = drawn.share_B[branch_N], logp_N.double() - drawn.log_prob_N
        gain_N = share_N * self._corrected(moved_N, branches) * drawn.advantage_B[branch_N]
        loss, weights_N, away_N = -gain_N.sum(), gain_N, torch.zeros_like(gain_N)
        if self.kl:
            assert drawn.reference_N is not None  # it was scored before the step
            away_N = logp_N.double() - drawn.reference_N
            loss = loss + self.kl * (share_N * away_N.square()).sum() / 2
            weights_N = weights_N - self.kl * share_N * away_N
        tokens_N = branches.tokens_B[branch_N]
        measured = [(moved_N.abs() / tokens_N).sum(), (away_N.square() / 2 / tokens_N).sum()]
        return Weighed(loss.float(), weights_N.float(), torch.stack(measured))

    def _corrected(self, moved_N: Tensor, branches: Branches) -> Tensor:
        if self.correction == "None":
            return torch.ones_like(moved_N)
        if self.correction == "Sequence":
            moved_N = branches.scores(moved_N)[branches.branch_N]
        return moved_N.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp().clamp(max=self.correction_limit)
