"""Frozen copy of the weights that a rank trains, exchanged with them for a forward of the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from polyreme_trainer.parallel.flat_buffers import FlatModel

_AT_ONCE = 1 << 22
"""Scalars that are exchanged at a time; bounds the memory."""


class ReferenceWeights:
    """Copy of a rank's trained weights as they are now.

    Contents are exchanged, not tensors: parameters stay where they are, so it works alike for flat buffers, rows of
    sharded parameters and adapters. Frozen weights, and the router's biases, are the reference's too.

    Args:
        flat: The rank's trained weights.
        first_step: First step of the stage whose reference they are.
    """

    def __init__(self, flat: FlatModel, *, first_step: int) -> None:
        self.first_step = first_step
        self._both = [(own, own.clone()) for part in flat.parts for own in part.memory()]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the reference's weights; updates of the own ones must be complete (``settle``)."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for both in self._both:
            for own, kept in zip(*(buffer.split(_AT_ONCE) for buffer in both), strict=True):
                held = own.clone()
                own.copy_(kept)
                kept.copy_(held)
