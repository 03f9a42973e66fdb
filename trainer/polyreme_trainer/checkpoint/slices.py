"""A tensor that is some rows of a larger one, as distributed checkpointing understands it.

``DTensor`` says the same, but constructing the first one imports the compiler: 2 to 8 s at each restart, for a step of
50 ms. The three dunder methods are the protocol through which ``DTensor`` itself is saved and loaded
(``torch.distributed._checkpointable``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class RowSlice(torch.Tensor):
    """Rows ``place * n .. (place + 1) * n`` of a tensor of ``parts * n`` rows; shares the storage of the local rows."""

    rows_NX: Tensor
    place: int
    parts: int

    # How torch's own subclasses say "treat me as a plain tensor".
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @staticmethod
    def of(rows_NX: Tensor, *, place: int, parts: int) -> RowSlice:
        """Wrap the local rows.

        Args:
            rows_NX: What this rank holds; a load writes into it.
            place: Which of the equal parts it is.
            parts: Parts of the whole.
        """
        wrapped = torch.Tensor._make_subclass(RowSlice, rows_NX.detach())  # noqa: SLF001
        wrapped.rows_NX, wrapped.place, wrapped.parts = rows_NX, place, parts
        return wrapped

    def size(self) -> torch.Size:  # type: ignore[override]
        """Size of the whole tensor: what the checkpoint knows."""
        rows, *rest = self.rows_NX.shape
        return torch.Size((rows * self.parts, *rest))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        offsets = torch.Size((self.place * self.rows_NX.shape[0], *(0 for _ in self.rows_NX.shape[1:])))
        return [ChunkStorageMetadata(offsets=offsets, sizes=self.rows_NX.shape)]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.rows_NX)
        data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.rows_NX
