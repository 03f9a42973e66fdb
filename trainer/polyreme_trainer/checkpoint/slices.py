"""A tensor that is a part of a larger one, as distributed checkpointing understands it.

``DTensor`` says the same, but constructing the first one imports the compiler: 2 to 8 s at each restart, for a step of
50 ms; and it has no word for a fused matrix whose blocks are cut one by one. The three dunder methods are the protocol
through which ``DTensor`` itself is saved and loaded (``torch.distributed._checkpointable``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from polyreme_trainer.model.sharding import Chunk, Cut, chunks, whole_shape


class Slice(torch.Tensor):
    """One of some equal slices of a tensor; shares the storage of the local part."""

    own: Tensor
    cut: Cut
    place: int
    parts: int

    # How torch's own subclasses say "treat me as a plain tensor".
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def of(own: Tensor, cut: Cut, *, place: int, parts: int) -> Slice:
        """Wrap the local part.

        Args:
            own: What this rank holds; a load writes into it.
            cut: How the whole is cut.
            place: Which of the equal slices it is.
            parts: Slices of the whole.
        """
        wrapped = torch.Tensor._make_subclass(Slice, own.detach())  # noqa: SLF001
        wrapped.own, wrapped.cut, wrapped.place, wrapped.parts = own, cut, place, parts
        return wrapped

    def size(self) -> torch.Size:  # type: ignore[override]
        """Size of the whole tensor: what the checkpoint knows."""
        return torch.Size(whole_shape(self.own.shape, self.cut, self.parts))

    def _chunks(self) -> list[tuple[Chunk, ChunkStorageMetadata]]:
        found = chunks(self.own.shape, self.cut, place=self.place, parts=self.parts)
        return [(chunk, ChunkStorageMetadata(self._along(chunk.whole), self._sizes(chunk.length))) for chunk in found]

    def _along(self, index: int) -> torch.Size:
        return torch.Size(index if dim == self.cut.dim else 0 for dim in range(self.own.ndim))

    def _sizes(self, length: int) -> torch.Size:
        return torch.Size(length if dim == self.cut.dim else size for dim, size in enumerate(self.own.shape))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [stored for _, stored in self._chunks()]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.own)
        return [
            WriteItem(
                index=MetadataIndex(fqn, stored.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=stored, properties=properties, size=self.size()),
            )
            for _, stored in self._chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk = next(chunk for chunk, stored in self._chunks() if stored.offsets == index.offset)
        return self.own.narrow(self.cut.dim, chunk.own, chunk.length)
