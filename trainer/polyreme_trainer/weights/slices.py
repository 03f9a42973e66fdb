"""Mapping of stored tensors to a rank's slices of them: pure arithmetic of names and slices.

Legend: E experts of this rank, F expert width, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor

from polyreme_trainer.export.names import DOWN, GATE_UP
from polyreme_trainer.model.sharding import chunks, cut_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The slices of the whole model that a rank holds; by default all of it."""

    experts: range
    """Routed experts, by their numbers in the model."""
    tensor: int = 0
    """Place among the tensor-parallel ranks."""
    tensor_parts: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a stored tensor, and its destination."""

    source: str
    """Name in the whole model, experts one by one."""
    own: Tensor
    """A view of what the rank holds, of the part's shape."""
    dim: int = 0
    start: int = 0
    """First index of the part along ``dim``; it is as long as ``own``, and whole along all dimensions after the
    first."""
    row: int = 0
    """First row of the part, if ``dim`` is another dimension."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a rank's tensor, if ranks share it; else all of them."""

    own: Tensor
    first: int = 0
    rows: int
    """Rows of all of it."""

    @staticmethod
    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Tensors that this rank holds all rows of."""
        return {name: Rows(own=tensor, rows=tensor.shape[0]) for name, tensor in tensors.items()}


def pieces(held: Mapping[str, Rows], place: Place) -> Iterator[Piece]:
    """Cut a rank's tensors into parts that lie in one stored tensor each.

    Args:
        held: Rows of the rank's tensors by their names in the whole model; experts stacked.
        place: Which slices these tensors are.
    """
    for name, rows in held.items():
        own, first, end = rows.own, rows.first, rows.first + rows.own.shape[0]
        if first == end:
            continue
        cut = cut_of(name) if place.tensor_parts > 1 else None
        if name.endswith((GATE_UP, DOWN)):
            yield from _experts(name, own, place.experts[first:end])
        elif cut is None:
            yield Piece(source=name, own=own, start=first)
        elif cut.dim:
            for chunk in chunks(own.shape, cut, place=place.tensor, parts=place.tensor_parts):
                part = own.narrow(cut.dim, chunk.own, chunk.length)
                yield Piece(source=name, own=part, dim=cut.dim, start=chunk.whole, row=first)
        else:
            for chunk in chunks((rows.rows, *own.shape[1:]), cut, place=place.tensor, parts=place.tensor_parts):
                begin, stop = max(first, chunk.own), min(end, chunk.own + chunk.length)
                if begin < stop:
                    part = own[begin - first : stop - first]
                    yield Piece(source=name, own=part, start=chunk.whole + begin - chunk.own)


def _experts(name: str, own_EXX: Tensor, experts: range) -> Iterator[Piece]:
    stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
    for expert, own_XX in zip(experts, own_EXX, strict=True):
        if name.endswith(DOWN):
            yield Piece(source=f"{stem}{expert}.down_proj.weight", own=own_XX)
        else:
            for part, own_FD in zip(("gate", "up"), own_XX.chunk(2), strict=True):
                yield Piece(source=f"{stem}{expert}.{part}_proj.weight", own=own_FD)
