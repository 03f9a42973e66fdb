"""Copies of a checkpoint's content in host memory, in buffers that are reused.

The step waits for this copy and for nothing else. Allocating a buffer costs more than the copy itself (its pages are
touched for the first time), so an attempt allocates once, before its first save. On CUDA the buffers are pinned and the
copies ordered on the stream of the step: the host does not wait at all, and later work of the step runs after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.parallel.host_memory import pinned_zeros

Allocate = Callable[[Sequence[Tensor]], list[Tensor]]
"""Makes a host buffer for each of some tensors."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Content in host memory."""

    content: Content
    ready: torch.cuda.Event | None = None
    """Event after the copies from a device."""

    def wait(self) -> Content:
        """Wait until the copies are complete; on a CPU they are."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.content


class Staging:
    """One set of host buffers, for one content at a time."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or host_buffers
        self._buffers: list[Tensor] = []

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The buffers, once something was staged: flat ones, then the small tensors by name."""
        return self._buffers

    def prepare(self, content: Content) -> None:
        """Allocate the buffers, which takes seconds where they are pinned."""
        if not self._buffers:
            self._buffers = self._allocate(content.buffers())

    def stage(self, content: Content) -> Staged:
        """Copy a content whose tensors have the same sizes as the first one's."""
        tensors = content.buffers()
        self.prepare(content)
        for kept, tensor in zip(self._buffers, tensors, strict=True):
            kept.copy_(tensor.detach(), non_blocking=True)
        ready = None
        if any(tensor.is_cuda for tensor in tensors):
            ready = torch.cuda.Event()
            ready.record()
        return Staged(content=content.over(self._buffers), ready=ready)


def host_buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate host memory, pinned if it is filled from a device."""
    return [
        pinned_zeros(t.numel(), t.dtype).view(t.shape) if t.is_cuda else torch.empty(t.shape, dtype=t.dtype)
        for t in tensors
    ]
