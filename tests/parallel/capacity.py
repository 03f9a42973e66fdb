"""What a layout with a capacity drops, worked out in one process, token by token: the reference of its gradient.

A sender is one rank in one microbatch. It keeps, for each expert, the first rows in the order of the tokens that it
holds; nothing else is known here of how rows are placed, sent, or put back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyreme_planner.layout import Layout
from polyreme_trainer.model.moe import Router
from polyreme_trainer.parallel.context import StreamCut
from polyreme_trainer.train.state import TrainState

Senders = list[list[int]]
"""Tokens of a step's packs, one pack after the other, that each sender routes, in its order."""


def senders(layout: Layout, *, packs: int, pack_tokens: int, microbatches: int) -> Senders:
    """Deal the tokens of a step out, as the ranks of a layout hold them between layers."""
    found: Senders = []
    stream = packs // layout.dp // microbatches * pack_tokens
    cut = StreamCut(tokens=stream, ring=layout.cp // layout.ulysses, ulysses=layout.ulysses)
    for begin in range(0, packs * pack_tokens, stream):
        for place in range(layout.cp):
            for part in np.split(cut.tokens_of(place), layout.tp):
                found.append((begin + part).tolist())
    return found


class Dropped:
    """Takes the weight of dropped rows away in a model that drops none, and counts them by layer and expert."""

    def __init__(self, state: TrainState, of: Senders, factor: float, *, padding: Collection[int]) -> None:
        self._of, self._factor, self._padding = of, factor, padding
        self.counts: dict[int, list[int]] = {}
        routers = [module for module in state.models[0].modules() if isinstance(module, Router)]
        for layer, router in enumerate(routers):
            self._watch(router, layer)

    def _watch(self, router: Router, layer: int) -> None:
        real = router.forward

        def forward(x_TD: Tensor, chosen_TK: Tensor | None = None) -> Any:
            weights_TK, experts_TK, scores_TE = real(x_TD, chosen_TK)
            kept_TK = self._kept(experts_TK.tolist(), scores_TE.shape[1], layer)
            return weights_TK * kept_TK, experts_TK, scores_TE

        vars(router)["forward"] = forward

    def _kept(self, experts_TK: Sequence[Sequence[int]], experts: int, layer: int) -> Tensor:
        chosen = len(experts_TK[0])
        kept = torch.ones(len(experts_TK), chosen)
        dropped = self.counts.setdefault(layer, [0] * experts)
        for tokens in self._of:
            room = [max(1, math.ceil(self._factor * len(tokens) * chosen / experts))] * experts
            for token in (token for token in tokens if token not in self._padding):
                for choice, expert in enumerate(experts_TK[token]):
                    if room[expert]:
                        room[expert] -= 1
                    else:
                        kept[token, choice] = 0.0
                        dropped[expert] += 1
        return kept
