"""A rank's part of a tensor: its description, and the boxes of the whole tensor that it fills.

``TensorShard`` says which mesh axes cut a tensor and which part this rank has. If ranks also shard the update (ZeRO-1,
FSDP), a rank holds runs of that part's scalars; a run is a few boxes: the end of a row, whole rows, the beginning of
one. A checkpoint therefore stores whole tensors by name, and any layout can read it.

``HeldTensor`` gives these boxes to distributed checkpointing. ``DTensor`` could describe some of them, but constructing
the first one imports the compiler (2 to 8 s at each restart, for a step of 50 ms), and it cannot express a fused matrix
whose blocks are cut one by one. Its three dunder methods are the protocol through which ``DTensor`` itself is saved and
loaded (``torch.distributed._checkpointable``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from polyreme_trainer.model.sharding import Cut, chunks, whole_shape

Held = tuple[tuple[int, ...], Tensor]
"""Where a box begins in the whole tensor, and the box."""


class ShardAxis(NamedTuple):
    """One mesh axis that cuts a tensor."""

    mesh: str
    """Name of the axis: ``tensor`` or ``expert``."""
    cut: Cut
    """The dimension that it cuts, and the blocks of a fused matrix along it."""
    place: int
    """Which of the equal parts this rank has."""
    parts: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """Which part of a tensor a rank has."""

    name: str
    axes: tuple[ShardAxis, ...] = ()
    """Axes that cut it, each along a dimension of its own; empty for a whole tensor."""

    def __post_init__(self) -> None:
        """Refuse two axes along one dimension: their parts would overlap.

        Raises:
            ValueError: Naming the tensor.
        """
        cut = [axis.cut.dim for axis in self.axes]
        if len(set(cut)) < len(cut):
            raise ValueError(f"two axes cut dimension {cut} of {self.name}, expected one for each dimension")

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, given the shape of this part."""
        for axis in self.axes:
            own = whole_shape(own, axis.cut, axis.parts)
        return tuple(own)

    def boxes(self, own: Sequence[int], begin: int, run: Tensor) -> Iterator[Held]:
        """Yield the boxes that a run of scalars fills.

        Args:
            own: Shape of this part.
            begin: The scalar of this part at which the run begins.
            run: The scalars; boxes are views of them.
        """
        cuts = [chunks(own, axis.cut, place=axis.place, parts=axis.parts) for axis in self.axes]
        for box in boxes(own, begin, begin + run.numel()):
            scalars = math.prod(box.sizes)
            view, run = run[:scalars].view(box.sizes), run[scalars:]
            for along_each_axis in itertools.product(*cuts):
                offsets, part = list(box.offsets), view
                for axis, chunk in zip(self.axes, along_each_axis, strict=True):
                    dim = axis.cut.dim
                    first = max(box.offsets[dim], chunk.own)
                    length = min(box.offsets[dim] + box.sizes[dim], chunk.own + chunk.length) - first
                    if length <= 0:
                        break
                    part = part.narrow(dim, first - box.offsets[dim], length)
                    offsets[dim] = chunk.whole + first - chunk.own
                else:
                    yield tuple(offsets), part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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


def boxes_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...], Tensor, tuple[int, ...]]]:
    """Yield the boxes that a rank holds of named tensors: name, where it begins, the box, shape of the whole tensor."""
    for name, tensor in state.items():
        if isinstance(tensor, HeldTensor):
            yield from ((name, tuple(offsets), box, tensor.whole) for offsets, box in tensor.held)
        else:
            yield name, (0,) * tensor.dim(), tensor, tuple(tensor.shape)


class HeldTensor(torch.Tensor):
    """The boxes that a rank holds of one tensor, for distributed checkpointing; shares their storage."""

    held: Sequence[Held]
    whole: tuple[int, ...]

    # How torch's own subclasses say "treat me as a plain tensor".
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def of(held: Sequence[Held], whole: tuple[int, ...]) -> HeldTensor:
        """Wrap boxes.

        Args:
            held: The boxes, at least one; a load writes into them.
            whole: Shape of the whole tensor.
        """
        wrapped = torch.Tensor._make_subclass(HeldTensor, held[0][1].detach())  # noqa: SLF001
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
