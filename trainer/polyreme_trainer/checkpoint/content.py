"""Content of a checkpoint, under names that do not depend on the layout.

``model.<parameter>``, ``optimizer.first.<parameter>``, ``optimizer.second.<parameter>``, ``router_bias.<layer>``,
``rng.<rank>``. Whole tensors are the same on several ranks and saved once. A sharded tensor is one global tensor, and
each rank holds a part of it (``shards.py``), so another layout reads other parts of the same tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from polyreme_trainer.checkpoint.shards import HeldTensor, TensorShard
from polyreme_trainer.parallel.flat_layout import Piece, Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensors:
    """Many tensors in one buffer, all under one prefix."""

    prefix: str
    shards: Sequence[TensorShard]
    """Which part of its tensor each slot is."""
    slots: Sequence[Slot]
    buffer: Tensor
    pieces: Sequence[Piece] | None = None
    """The pieces of the slots that the buffer holds, if ranks shard the update; None if it holds all of them."""
    begin: int = 0
    """Scalar of what the rank updates at which the buffer begins; only with pieces."""

    def outline(self) -> tuple[object, ...]:
        """Names, positions, sizes, shards, pieces and type: equal where buffers hold the same."""
        slots = [(slot.name, slot.start, slot.shape) for slot in self.slots]
        pieces = None if self.pieces is None else tuple(self.pieces)
        return self.prefix, slots, tuple(self.shards), str(self.buffer.dtype), pieces, self.begin

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and views of all tensors that this rank holds, whole or in part."""
        for slot, shard in zip(self.slots, self.shards, strict=True):
            name = f"{self.prefix}.{shard.name}"
            if self.pieces is None and not shard.axes:
                yield name, slot.view(self.buffer)
            elif held := [box for run in self._runs(slot) for box in shard.boxes(slot.shape, *run)]:
                yield name, HeldTensor.of(held, shard.whole_shape(slot.shape))

    def _runs(self, slot: Slot) -> Iterator[tuple[int, Tensor]]:
        """Yield where in the slot each run of scalars begins, and the run."""
        if self.pieces is None:
            yield 0, slot.view(self.buffer).view(-1)
            return
        for piece in self.pieces:
            start = max(slot.start, piece.start)
            stop = min(slot.start + slot.length, piece.start + piece.length)
            if start < stop:
                own = piece.own - self.begin + start - piece.start
                yield start - slot.start, self.buffer[own : own + stop - start]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All tensors of a checkpoint on one rank."""

    flat: Sequence[FlatTensors]
    plain: Mapping[str, Tensor]
    """Small tensors outside the buffers."""

    def buffers(self) -> list[Tensor]:
        """All memory of the content: the flat buffers, then the small tensors by name."""
        return [*(part.buffer for part in self.flat), *(self.plain[name] for name in sorted(self.plain))]

    def over(self, buffers: Sequence[Tensor]) -> Content:
        """The same names over other memory, given in the order of ``buffers``."""
        flat = [dataclasses.replace(part, buffer=buffer) for part, buffer in zip(self.flat, buffers, strict=False)]
        plain = dict(zip(sorted(self.plain), buffers[len(flat) :], strict=True))
        return Content(flat=flat, plain=plain)

    def state_dict(self) -> dict[str, Tensor]:
        """Name every tensor as distributed checkpointing expects them; views, so that a load writes in place."""
        return {**self.plain, **{name: tensor for part in self.flat for name, tensor in part.tensors()}}
