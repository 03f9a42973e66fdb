"""Routing statistics of layers: counts that add up over microbatches and ranks, as one block of numbers.

Legend: L layers with experts, E experts, X = 2 E + 1 numbers of a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme_trainer.model.moe import Routed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Sums over some tokens."""

    load_LE: Tensor
    """Tokens routed to each expert, int64 on one rank."""
    dropped_LE: Tensor
    """Those of them that were dropped."""
    entropy_L: Tensor
    """Entropy of the tokens' scores [nats], float32."""

    @classmethod
    def of(cls, layers: Sequence[Routed], *, experts: int, device: torch.device) -> Routing:
        """Join the layers of a section; there may be none."""
        if not layers:
            none_LE = torch.zeros((0, experts), dtype=torch.int64, device=device)
            return cls(load_LE=none_LE, dropped_LE=none_LE, entropy_L=torch.zeros(0, device=device))
        return cls(
            load_LE=torch.stack([layer.load_E for layer in layers]),
            dropped_LE=torch.stack([layer.dropped_E for layer in layers]),
            entropy_L=torch.stack([layer.entropy for layer in layers]),
        )

    @classmethod
    def from_numbers(cls, numbers_LX: Tensor) -> Routing:
        """Undo ``numbers``; counts stay in the type of the numbers."""
        experts = (numbers_LX.shape[1] - 1) // 2
        load_LE, dropped_LE, entropy_L1 = numbers_LX.split((experts, experts, 1), dim=1)
        return cls(load_LE=load_LE, dropped_LE=dropped_LE, entropy_L=entropy_L1.squeeze(1))

    def numbers(self) -> Tensor:
        """All of it in one float32 block (L, X): counts are exact up to 2**24."""
        return torch.cat((self.load_LE.float(), self.dropped_LE.float(), self.entropy_L.unsqueeze(1)), dim=1)

    def summary(self, *, experts_per_token: int) -> Summary:
        """Summarise it in three numbers, on the host."""
        rows = float(self.load_LE.sum())
        if not rows:
            return Summary(load_max=0.0, entropy=0.0, dropped=0)
        load_LE = self.load_LE.double()
        return Summary(
            load_max=float((load_LE.amax(1) / load_LE.mean(1)).max()),
            entropy=float(self.entropy_L.double().sum()) / (rows / experts_per_token),
            dropped=round(float(self.dropped_LE.double().sum())),
        )

    def by_layer(self, *, experts_per_token: int) -> tuple[tuple[float, float, int], ...]:
        """Return for each layer the fullest expert over the mean, the mean entropy of a token, and rows dropped."""
        load_LE = self.load_LE.double()
        tokens_L = load_LE.sum(1) / experts_per_token
        fullest_L = load_LE.amax(1) / load_LE.mean(1).clamp(min=1e-30)
        entropy_L = self.entropy_L.double() / tokens_L.clamp(min=1)
        dropped_L = self.dropped_LE.double().sum(1).round().long()
        return tuple(zip(fullest_L.tolist(), entropy_L.tolist(), dropped_L.tolist(), strict=True))

    def __add__(self, other: Routing) -> Routing:
        """Sum of both."""
        return Routing(
            load_LE=self.load_LE + other.load_LE,
            dropped_LE=self.dropped_LE + other.dropped_LE,
            entropy_L=self.entropy_L + other.entropy_L,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The routing of all layers."""

    load_max: float
    """Tokens of the fullest expert over the mean of its layer's, the largest of all layers."""
    entropy: float
    """Mean over tokens and layers [nats]."""
    dropped: int
    """Rows of all layers."""


def numbers_of_a_layer(experts: int) -> int:
    """Number of routing statistics of a layer."""
    return 2 * experts + 1
