"""Parameters and gradients in flat buffers: one all-reduce, one optimizer call, one copy for a checkpoint.

On CPU an optimizer step over 650 k parameters takes 0.5 ms flat against some ms tensor by tensor, and a gloo all-reduce
costs nearly the same for one float as for a MiB.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

_ALIGNMENT = 16
"""Elements to which every parameter is aligned: grouped matrix products on CUDA need 16 bytes. The gaps stay zero."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one parameter lies in its flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Scalars of the parameter."""
        return int(torch.Size(self.shape).numel())

    def view(self, buffer: Tensor) -> Tensor:
        """The parameter's part of a buffer of this layout."""
        return buffer[self.start : self.start + self.length].view(self.shape)


class FlatParameters:
    """Parameters moved into one buffer, matrices first; their gradients in another, with ``riders`` at its end.

    After construction every parameter is a view of ``values`` and its ``grad`` a view of ``gradients``: backward
    accumulates in place.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, riders: int = 0) -> None:
        parameters = sorted(named, key=lambda item: item[1].ndim < 2)
        self.slots = _lay_out(parameters)
        self.length = _aligned(self.slots[-1].start + self.slots[-1].length) if self.slots else 0
        vectors = [slot.start for slot in self.slots if len(slot.shape) < 2]
        self.matrices_end = min(vectors, default=self.length)
        """Scalars before this one belong to matrices, which alone decay."""
        like = parameters[0][1] if parameters else torch.empty(0)
        self.values = torch.zeros(self.length, dtype=like.dtype, device=like.device)
        self._reduced = torch.zeros(self.length + riders, dtype=like.dtype, device=like.device)
        for slot, (_, parameter) in zip(self.slots, parameters, strict=True):
            slot.view(self.values).copy_(parameter.detach())
            parameter.data = slot.view(self.values)
            parameter.grad = slot.view(self._reduced)

    @property
    def gradients(self) -> Tensor:
        """Gradients of all parameters."""
        return self._reduced[: self.length]

    @property
    def riders(self) -> Tensor:
        """Numbers that ride at the end of the gradients' all-reduce."""
        return self._reduced[self.length :]

    @property
    def reduced(self) -> Tensor:
        """Gradients and riders: what one all-reduce sums."""
        return self._reduced

    def clear_gradients(self) -> None:
        """Set gradients and riders to zero, before a backward pass."""
        self._reduced.zero_()

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its part of a buffer of this layout."""
        for slot in self.slots:
            yield slot.name, slot.view(buffer)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatModel:
    """All trained parameters of this rank: dense ones, the same on all ranks, and those of its own experts."""

    dense: FlatParameters
    experts: FlatParameters

    @property
    def parts(self) -> tuple[FlatParameters, FlatParameters]:
        """Both buffers."""
        return self.dense, self.experts


def flatten(named: Mapping[str, nn.Parameter], *, expert_names: Sequence[str], riders: int) -> FlatModel:
    """Move a model's parameters into flat buffers, which replaces their storage.

    Args:
        named: All trained parameters by their global names.
        expert_names: Those of routed experts, of which this rank holds a slice.
        riders: Numbers that ride in the dense all-reduce.
    """
    experts = set(expert_names)
    return FlatModel(
        dense=FlatParameters(((name, p) for name, p in named.items() if name not in experts), riders=riders),
        experts=FlatParameters((name, p) for name, p in named.items() if name in experts),
    )


def _lay_out(parameters: Sequence[tuple[str, nn.Parameter]]) -> tuple[Slot, ...]:
    starts = itertools.accumulate((_aligned(p.numel()) for _, p in parameters), initial=0)
    return tuple(
        Slot(name=name, start=start, shape=tuple(p.shape)) for (name, p), start in zip(parameters, starts, strict=False)
    )


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
