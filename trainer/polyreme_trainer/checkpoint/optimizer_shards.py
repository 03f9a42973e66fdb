"""Tensors of which a rank holds some runs of scalars, wherever a divided update has cut them.

A run of a tensor's scalars, in their order, is a few boxes of the tensor: the end of a row, whole rows, the beginning
of one. A checkpoint so knows whole tensors under their names, and any layout reads it, divided or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from polyreme_trainer.checkpoint.content import FlatTensors
from polyreme_trainer.model.sharding import Cut, chunks, cut_of, whole_shape
from polyreme_trainer.parallel.flat_buffers import Piece, Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DividedTensors(FlatTensors):
    """The pieces that a rank holds of many tensors, in one buffer."""

    pieces: Sequence[Piece]
    begin: int = 0
    """Scalar of what the rank updates at which the buffer begins."""

    def outline(self) -> tuple[object, ...]:
        """What lies where, and which pieces of it."""
        return *FlatTensors.outline(self), tuple(self.pieces), self.begin

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and pieces of all tensors of which this rank holds some."""
        for slot in self.slots:
            held = [place for run in self._runs(slot) for place in self._places(slot, *run)]
            if held:
                yield f"{self.prefix}.{slot.name}", Pieces.of(held, self._size(slot))

    def _size(self, slot: Slot) -> tuple[int, ...]:
        return slot.shape if self.part is None else whole_shape(slot.shape, self._cut(slot), self.part[1])

    @staticmethod
    def _cut(slot: Slot) -> Cut:
        # Stacks of experts stand in no table: they are cut by rows.
        return cut_of(slot.name) or Cut(dim=0)

    def _runs(self, slot: Slot) -> Iterator[tuple[int, Tensor]]:
        """Yield where in the parameter each run begins, and the run."""
        for piece in self.pieces:
            start = max(slot.start, piece.start)
            stop = min(slot.start + slot.length, piece.start + piece.length)
            if start < stop:
                own = piece.own - self.begin + start - piece.start
                yield start - slot.start, self.buffer[own : own + stop - start]

    def _places(self, slot: Slot, begin: int, run: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield where in the whole tensor each box of a run lies, and the box."""
        at = 0
        for box in boxes(slot.shape, begin, begin + run.numel()):
            length = math.prod(box.sizes)
            view = run[at : at + length].view(box.sizes)
            at += length
            if self.part is None:
                yield box.offsets, view
                continue
            dim = (cut := self._cut(slot)).dim
            for chunk in chunks(slot.shape, cut, place=self.part[0], parts=self.part[1]):
                first = max(box.offsets[dim], chunk.own)
                last = min(box.offsets[dim] + box.sizes[dim], chunk.own + chunk.length)
                if first < last:
                    offsets = list(box.offsets)
                    offsets[dim] = chunk.whole + first - chunk.own
                    yield tuple(offsets), view.narrow(dim, first - box.offsets[dim], last - first)


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cut the scalars ``begin .. end`` of a tensor, in their order, into boxes, in the same order."""
    if len(shape) == 1:
        return [Box(offsets=(begin,), sizes=(end - begin,))]
    row = math.prod(shape[1:])
    found: list[Box] = []
    while begin < end:
        first, inside = divmod(begin, row)
        if inside == 0 and end - begin >= row:
            rows = (end - begin) // row
            found.append(Box(offsets=(first, *[0] * (len(shape) - 1)), sizes=(rows, *shape[1:])))
            begin += rows * row
            continue
        stop = min(end, (first + 1) * row)
        inner = boxes(shape[1:], inside, stop - first * row)
        found += [Box(offsets=(first, *box.offsets), sizes=(1, *box.sizes)) for box in inner]
        begin = stop
    return found


class Pieces(torch.Tensor):
    """Boxes of one tensor, as distributed checkpointing understands them; shares their storage (see ``slices``)."""

    held: Sequence[tuple[tuple[int, ...], Tensor]]
    whole: tuple[int, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def of(held: Sequence[tuple[tuple[int, ...], Tensor]], whole: tuple[int, ...]) -> Pieces:
        """Wrap boxes.

        Args:
            held: Where each box begins in the whole tensor, and the box; a load writes into it.
            whole: Shape of the whole tensor.
        """
        wrapped = torch.Tensor._make_subclass(Pieces, held[0][1].detach())  # noqa: SLF001
        wrapped.held, wrapped.whole = held, whole
        return wrapped

    def size(self) -> torch.Size:  # type: ignore[override]
        """Size of the whole tensor: what the checkpoint knows."""
        return torch.Size(self.whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.held]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.held[0][1])
        return [
            WriteItem(
                index=MetadataIndex(fqn, stored.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=stored, properties=properties, size=self.size()),
            )
            for stored in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for offsets, box in self.held if torch.Size(offsets) == index.offset)
