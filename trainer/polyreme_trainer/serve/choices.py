"""Record of the experts that each token of each sequence went to, so that training can send it there again.

Legend: T tokens of a sequence or of a group of pieces, L layers with experts of the model, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.model.section import Section
from polyreme_trainer.serve.scheduler import Piece


class Choices:
    """The choices of an engine's sequences: (T, L, X), a byte each up to 256 experts, else two.

    Layers that other ranks hold are zero.
    """

    def __init__(self, shape: DecoderShape) -> None:
        self._shape = shape
        self._type = torch.uint8 if shape.experts <= 1 << 8 else torch.int16
        self._of: dict[int, Tensor] = {}

    def keep(self, pieces: Sequence[Piece], section: Section, experts: Sequence[Tensor]) -> None:
        """Note where the rows of pieces went, in the layers of a section, each (T, X)."""
        held = [self._sequence(piece)[piece.begin : piece.end] for piece in pieces]  # also without such layers
        if not experts:
            return
        chosen_TLX = torch.stack(list(experts), dim=1).to(self._type).cpu()
        first = max(section.layers.start - self._shape.dense_layers, 0)
        for own_TLX, rows_TLX in zip(held, chosen_TLX.split([own.shape[0] for own in held]), strict=True):
            own_TLX[:, first : first + len(experts)] = rows_TLX

    def take(self, number: int, tokens: int) -> Tensor:
        """Return the choices of a sequence's first tokens, and forget them."""
        return self._of.pop(number)[:tokens]

    def _sequence(self, piece: Piece) -> Tensor:
        sequence, shape = piece.sequence, self._shape
        if sequence.number not in self._of:
            tokens = sequence.prompt + sequence.new_tokens_max
            sizes = (tokens, shape.layers - shape.dense_layers, shape.experts_per_token)
            self._of[sequence.number] = torch.zeros(sizes, dtype=self._type)
        return self._of[sequence.number]
