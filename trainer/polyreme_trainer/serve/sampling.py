"""The next token of each answer: the most likely one, or a draw that its seed and place decide.

A draw is of a counter-based generator keyed by (seed, number of the token in its answer): it depends neither on what
runs beside it nor on the rank, so a repeated run draws the same tokens (Salmon et al., SC 2011).

Legend: B answers, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Draw(NamedTuple):
    """How a token is chosen."""

    temperature: float
    seed: int
    number: int
    """Of the token in its answer."""
    forced: int | None = None
    """The token, where it is not chosen."""

    @property
    def uniform(self) -> float:
        """The draw, in [0, 1)."""
        return float(np.random.Generator(np.random.Philox(key=self.seed, counter=self.number)).random())


def choose(logits_BV: Tensor, draws: list[Draw]) -> Tensor:
    """Choose a token a row.

    Returns:
        float64 (B, 2): the token, and its log-probability in the distribution that it was taken from.
    """
    heat = [draw.temperature or 1.0 for draw in draws]
    logits_BV = logits_BV.float()
    if any(one != 1 for one in heat):
        logits_BV = logits_BV / torch.tensor(heat, device=logits_BV.device).unsqueeze(1)
    best_B = logits_BV.argmax(-1)
    if any(draw.temperature for draw in draws):
        drawn_B = torch.tensor([draw.uniform if draw.temperature else 0.0 for draw in draws], dtype=torch.float64)
        below_BV = logits_BV.double().softmax(-1).cumsum(-1)
        limit_B1 = (drawn_B.to(below_BV.device) * below_BV[:, -1]).unsqueeze(1)
        picked_B = (below_BV <= limit_B1).sum(-1).clamp_(max=logits_BV.shape[1] - 1)
        random_B = torch.tensor([bool(draw.temperature) for draw in draws], device=best_B.device)
        best_B = torch.where(random_B, picked_B, best_B)
    if any(draw.forced is not None for draw in draws):
        given = [-1 if draw.forced is None else draw.forced for draw in draws]
        given_B = torch.tensor(given, device=best_B.device)
        best_B = torch.where(given_B >= 0, given_B, best_B)
    log_prob_B = logits_BV.gather(1, best_B.unsqueeze(1)).squeeze(1) - logits_BV.logsumexp(-1)
    return torch.stack((best_B.double(), log_prob_B.double()), dim=1)
