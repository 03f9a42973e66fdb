"""``INDEX.json`` of a checkpoint: the position of each piece of each tensor in its files.

::

    {"tensors": {"model.<parameter>": {"dtype": "float32", "shape": [64, 1408, 2048], "pieces": [
        {"offsets": [0, 0, 0], "sizes": [32, 1408, 2048], "file": "00000-000.bin", "begin": 0}, ...]}}}

A piece is the raw bytes of a box of its tensor, row by row, little-endian. The pieces of a tensor fill it without
overlap.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from polyreme_api.errors import RefusedError

INDEX_NAME = "INDEX.json"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box of a tensor that is somewhere else."""

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the whole tensor."""
    sizes: tuple[int, ...]

    @property
    def index(self) -> MetadataIndex:
        """Index of the box in torch's plans."""
        return MetadataIndex(self.tensor, torch.Size(self.offsets))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece(StoredBox):
    """A box of a tensor, and the position of its bytes."""

    file: str
    begin: int
    """Byte at which the box begins in the file."""


def write_index(pieces: Iterable[Piece]) -> bytes:
    """Write the index of a checkpoint's pieces."""
    tensors: dict[str, dict[str, Any]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.offsets)):
        entry = tensors.setdefault(
            piece.tensor, {"dtype": _NAMES[piece.dtype], "shape": list(piece.shape), "pieces": []}
        )
        entry["pieces"].append(
            {"offsets": list(piece.offsets), "sizes": list(piece.sizes), "file": piece.file, "begin": piece.begin}
        )
    return json.dumps({"tensors": tensors}, separators=(",", ":")).encode()


def read_index(text: bytes, *, name: str) -> list[Piece]:
    """Read an index back.

    Raises:
        RefusedError: If it is no index, though its checksum is right: a later minor version wrote it.
    """
    try:
        return [
            Piece(
                tensor=tensor,
                dtype=_DTYPES[entry["dtype"]],
                shape=tuple(entry["shape"]),
                offsets=tuple(piece["offsets"]),
                sizes=tuple(piece["sizes"]),
                file=piece["file"],
                begin=piece["begin"],
            )
            for tensor, entry in json.loads(text)["tensors"].items()
            for piece in entry["pieces"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"checkpoint index can't be read: {name}/{INDEX_NAME}: {error!r}") from error


def wanted_parts(state: dict[str, Tensor], stored: Sequence[StoredBox]) -> tuple[list[ReadItem], DefaultLoadPlanner]:
    """Intersect the boxes that a rank wants with those that are stored.

    Args:
        state: What a rank wants, as ``Content.state_dict`` names it.
        stored: Boxes that fill the tensors without overlap.

    Returns:
        The parts of stored boxes that fill the wanted ones, and the planner that finds the memory of each.

    Raises:
        RuntimeError: If a tensor is missing.
        ValueError: If it has another size.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, _metadata(stored))
    return planner.create_local_plan().items, planner


def _metadata(pieces: Sequence[StoredBox]) -> Metadata:
    """Describe the tensors in the form of torch's planners."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for piece in pieces:
        entry = tensors.setdefault(
            piece.tensor,
            TensorStorageMetadata(
                properties=TensorProperties(dtype=piece.dtype), size=torch.Size(piece.shape), chunks=[]
            ),
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
    return Metadata(dict(tensors))


def by_index(pieces: Iterable[Piece]) -> Mapping[MetadataIndex, Piece]:
    """Return pieces by their index in torch's plans."""
    return {piece.index: piece for piece in pieces}


def can_hold(dtype: torch.dtype) -> bool:
    """Whether an index has a name for the type."""
    return dtype in _NAMES
