"""Copies from the host to an accelerator that the host does not wait for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes to which each tensor is aligned in the common buffer."""


def on_device(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy host tensors to a device, all of them at once and from pinned memory; on a processor they stay as they are.

    A copy from pageable memory makes the host wait until the device has done all before it, and each takes a launch.
    Torch's allocator keeps pinned memory until the copy is done.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return list(tensors)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = list(itertools.accumulate(sizes, initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8).pin_memory()
    for tensor, place in zip(tensors, _places(packed, tensors, starts), strict=True):
        place.copy_(tensor)
    return _places(packed.to(device, non_blocking=True), tensors, starts)


def _places(packed: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    return [
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]
