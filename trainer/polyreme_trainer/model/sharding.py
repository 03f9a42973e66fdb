"""The table of tensor-parallel cuts: parameters are built, drawn, saved and exported by it.

A parameter without a line is held whole. Rows of a first matrix belong to heads or inner columns, and so do the columns
of the second one; a fused matrix is several of the former stacked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The cut of a parameter."""

    dim: int
    """Dimension that the ranks share."""
    blocks: int = 1
    """Equal blocks along that dimension, each cut separately: 3 for fused queries, keys and values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a whole tensor that is contiguous in a slice of it."""

    whole: int
    """First index in the whole, along the dimension that is cut."""
    own: int
    """First index in the slice."""
    length: int


_ROWS, _COLUMNS = Cut(dim=0), Cut(dim=1)
_CUTS: Sequence[tuple[str, Cut]] = (
    (r"self_attn\.(q_proj|q_b_proj|kv_b_proj)\.(weight|lora_B)", _ROWS),
    (r"self_attn\.o_proj\.(weight|lora_A)", _COLUMNS),
    (r"mlp\.(shared_experts\.)?(gate_proj|up_proj)\.(weight|lora_B)", _ROWS),
    (r"mlp\.(shared_experts\.)?down_proj\.(weight|lora_A)", _COLUMNS),
    (r"(embed_tokens|lm_head)\.weight", _ROWS),
    (r"wqkv\.(weight|bias)", Cut(dim=0, blocks=3)),
    (r"wo\.weight", _COLUMNS),
    (r"(fc0|linear_1)\.(weight|bias)", _ROWS),
    (r"(fc1|linear_2)\.weight", _COLUMNS),
)
_PATTERNS = tuple((re.compile(rf"(.*\.)?{pattern}"), cut) for pattern, cut in _CUTS)


def cut_of(name: str) -> Cut | None:
    """Return how the parameter of this global name is cut, or None if every rank holds it whole."""
    return next((cut for pattern, cut in _PATTERNS if pattern.fullmatch(name)), None)


def whole_shape(own: Sequence[int], cut: Cut, parts: int) -> tuple[int, ...]:
    """Shape of the whole parameter, from ``own``, the shape of a slice."""
    return tuple(size * parts if dim == cut.dim else size for dim, size in enumerate(own))


def chunks(own: Sequence[int], cut: Cut, *, place: int, parts: int) -> tuple[Chunk, ...]:
    """Return the positions of a slice's pieces in the whole.

    Args:
        own: Shape of the slice.
        cut: How the parameter is cut.
        place: Which slice it is.
        parts: Slices of the whole.
    """
    length = own[cut.dim] // cut.blocks
    return tuple(
        Chunk(whole=(block * parts + place) * length, own=block * length, length=length) for block in range(cut.blocks)
    )


def slice_of(whole: Tensor, cut: Cut, *, place: int, parts: int) -> Tensor:
    """Cut one rank's slice from a whole parameter."""
    blocks = whole.chunk(cut.blocks, dim=cut.dim)
    return torch.cat([block.chunk(parts, dim=cut.dim)[place] for block in blocks], dim=cut.dim)


def join(slices: Sequence[Tensor], cut: Cut) -> Tensor:
    """Join the slices of all ranks; undoes ``slice_of``."""
    cut_slices = [part.chunk(cut.blocks, dim=cut.dim) for part in slices]
    blocks = [torch.cat([part[block] for part in cut_slices], dim=cut.dim) for block in range(cut.blocks)]
    return torch.cat(blocks, dim=cut.dim)
