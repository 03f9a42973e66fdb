"""Weights in FP8 by blocks, as DeepSeek-V3 and Kimi-K2 are released: a float32 scale for each block of a matrix.

Legend: R rows and C columns of a part, U and V rows and columns of blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.weights.stored import Stored

DTYPE = "F8_E4M3"
"""In safetensors' notation."""
SCALES = "_scale_inv"
"""Suffix of the name of a weight's scales."""
_SIDES = (128, 128)
"""Rows and columns of a block, unless ``config.json`` names others."""


def block_sides(config: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    whole = config or {}
    for part in (whole, whole.get("text_config") or {}):
        sides = (part.get("quantization_config") or {}).get("weight_block_size")
        if sides:
            return int(sides[0]), int(sides[1])
    return _SIDES


def joined(tensors: Mapping[str, Stored], *, sides: tuple[int, int]) -> dict[str, Stored]:
    """Return tensors of a folder with each weight in FP8 and the scales of its blocks as one, under its name."""
    found = dict(tensors)
    for name, stored in tensors.items():
        scales = tensors.get(f"{name}{SCALES}")
        if stored.dtype == DTYPE and scales is not None and scales.dtype == "F32" and len(stored.shape) == 2:
            blocks = tuple(-(-extent // side) for extent, side in zip(stored.shape, sides, strict=True))
            if scales.shape == blocks:
                del found[f"{name}{SCALES}"]
                found[name] = dataclasses.replace(stored, scales=scales.file)
    return found


def scaled(part_RC: Tensor, scales_UV: Tensor, *, first: tuple[int, int], sides: tuple[int, int]) -> Tensor:
    """Return a part of a weight in float32.

    Args:
        part_RC: As it is stored.
        scales_UV: Of the whole weight.
        first: Row and column at which the part begins.
        sides: Rows and columns of a block.
    """
    row_R, column_C = (
        torch.arange(begin, begin + count) // side
        for begin, count, side in zip(first, part_RC.shape, sides, strict=True)
    )
    return part_RC.float() * scales_UV[row_R][:, column_C]
