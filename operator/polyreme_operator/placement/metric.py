"""Distances between the places of one gang, as the exclusive or of short codes.

Shape suffixes: S places of the gang, in the order of their rows.

A place's code holds the number of its domain within the domain above, level by level, the top level in the highest
bits. Two places part at a level or above it exactly if the exclusive or of their codes reaches that level's lowest bit,
so one look-up and one comparison for each level give the distance of a pair.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import IntArray, RowArray

CODE_BITS_MAX = 62
SHORT_BITS_MAX = 31
"""Codes of up to so many bits take half the memory."""
TABLE_BITS_MAX = 16
"""A table of distances has at most 2^16 entries (512 KiB), so that it stays in the CPU's cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """Distances between the places of one gang."""

    code_S: NDArray[Any]
    steps: tuple[tuple[int, int], ...]
    """Lowest bit of each level, and what parting there adds to the distance; the lowest level first. A level at which
    no two places part, or at which they part wherever they part above, has none."""
    table: NDArray[np.float64] | None = None
    """Distance by the exclusive or of two codes, if codes are short."""

    def between(self, here: Any, there: Any) -> NDArray[np.float64]:
        """Return the distances of pairs of codes."""
        apart = here ^ there
        return self._distances(apart) if self.table is None else self.table[apart]

    def tabled(self) -> Metric:
        """Return the same distances with a lookup table, if codes are short."""
        codes = 1 << int(self.code_S.max()).bit_length()
        if codes > 1 << TABLE_BITS_MAX:
            return self
        return dataclasses.replace(self, table=self._distances(np.arange(codes)))

    def total(self, apart: Any) -> int:
        """Return the sum of distances, exactly, from the exclusive ors of codes."""
        return sum(rise * int(np.count_nonzero(apart >= bit)) for bit, rise in self.steps)

    def _distances(self, apart: Any) -> NDArray[np.float64]:
        total = np.zeros(apart.shape)
        for bit, rise in self.steps:
            total += rise * (apart >= bit)
        return total


def metric_of(tree: Tree, slots_S: RowArray) -> Metric | None:
    """Encode the places of a gang; None if the tree needs more than 62 bits, so that its ranks are not searched.

    Args:
        tree: Of domains.
        slots_S: Rows of the places, rising.
    """
    fields: list[tuple[IntArray, int, int]] = []
    start_A = np.zeros(1, dtype=np.intp)
    for rise, domain_N in zip(tree.rise_L, tree.domain_LN, strict=True):
        new_S = changes(domain_N.take(slots_S))
        own_S = np.cumsum(new_S)
        local_S: IntArray = own_S - np.repeat(own_S[start_A], lengths(start_A, len(slots_S)))
        bits = int(local_S.max()).bit_length()
        if bits:
            fields.append((local_S, bits, int(rise)))
        elif fields:  # wherever two places part here, they part at the level above
            fields[-1] = (*fields[-1][:2], fields[-1][2] + int(rise))
        start_A = np.flatnonzero(new_S)
    whole = sum(bits for _, bits, _ in fields)
    if whole > CODE_BITS_MAX:
        return None
    code_S = np.zeros(len(slots_S), dtype=np.int64)
    steps: list[tuple[int, int]] = []
    shift = 0
    for local_S, bits, rise in reversed(fields):
        code_S |= local_S << shift
        steps.append((1 << shift, rise))
        shift += bits
    return Metric(code_S.astype(np.int32) if whole <= SHORT_BITS_MAX else code_S, tuple(steps))


def changes(value_I: Any) -> NDArray[np.bool_]:
    """Return where a value differs from the one before it; the first does."""
    new_I = np.ones(len(value_I), dtype=np.bool_)
    np.not_equal(value_I[1:], value_I[:-1], out=new_I[1:])
    return new_I


def lengths(start_A: NDArray[np.intp], end: int) -> NDArray[np.intp]:
    """Return the lengths of consecutive runs from their starts."""
    run_A = np.empty_like(start_A)
    np.subtract(start_A[1:], start_A[:-1], out=run_A[:-1])
    run_A[-1:] = end - start_A[-1:]
    return run_A
