"""Tables that follow from an image's grid of patches alone: order, positions, interpolation taps. Cached: grids repeat.

Inside the tower the patches of an image are in the order of the 2x2 merge (all patches of a merged cell side by side),
so that the pixel shuffle is a view. Attention does not depend on order, and positions travel with the patches.

Legend: P patches of one image, B taps of the bicubic kernel (4 x 4).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme_api.errors import InvalidConfigError

CACHED_GRIDS_MAX = 512
KEYS_A = -0.75
"""Sharpness of the cubic convolution kernel, as in ``torch.nn.functional.interpolate(mode="bicubic")``."""

Grid = tuple[int, int]
"""Rows and columns of an image [patches]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GridTables:
    """Tables of one image, or of several packed ones, in merge order."""

    order_P: Tensor
    """Index of each patch in row-major order, int64."""
    row_P: Tensor
    column_P: Tensor
    tap_PB: Tensor
    """Cells of the flattened position table, int64."""
    weight_PB: Tensor
    """Weight of each cell, float32."""


def packed_tables(grids: Sequence[Grid], *, merge: int, table_side: int) -> GridTables:
    """Concatenate the tables of packed images.

    Raises:
        InvalidConfigError: If a grid has no patches or is not a multiple of ``merge``.
    """
    parts = [_grid_tables(rows, columns, merge, table_side) for rows, columns in grids]
    if not parts:
        return _empty_tables()
    starts = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + part.order_P.shape[0])
    return GridTables(
        order_P=torch.cat([part.order_P + start for part, start in zip(parts, starts, strict=True)]),
        row_P=torch.cat([part.row_P for part in parts]),
        column_P=torch.cat([part.column_P for part in parts]),
        tap_PB=torch.cat([part.tap_PB for part in parts]),
        weight_PB=torch.cat([part.weight_PB for part in parts]),
    )


@functools.lru_cache(maxsize=CACHED_GRIDS_MAX)
def _grid_tables(rows: int, columns: int, merge: int, table_side: int) -> GridTables:
    if rows < 1 or columns < 1 or rows % merge or columns % merge:
        raise InvalidConfigError(
            f"image grid does not fit: {rows} x {columns} patches, expected positive multiples of {merge}"
        )
    order_P = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
    row_P, column_P = order_P // columns, order_P % columns
    row_tap, row_weight = _taps(row_P, rows, table_side)
    column_tap, column_weight = _taps(column_P, columns, table_side)
    tap_PB = (row_tap.unsqueeze(2) * table_side + column_tap.unsqueeze(1)).flatten(1)
    weight_PB = (row_weight.unsqueeze(2) * column_weight.unsqueeze(1)).flatten(1)
    return GridTables(order_P=order_P, row_P=row_P, column_P=column_P, tap_PB=tap_PB, weight_PB=weight_PB)


def _taps(index_P: Tensor, extent: int, side: int) -> tuple[Tensor, Tensor]:
    """Four taps and their Keys weights along one axis, half-pixel centres, border repeated."""
    source_P = (index_P.float() + 0.5) * (side / extent) - 0.5
    floor_P = source_P.floor()
    offsets = torch.arange(-1, 3)
    distance = (source_P - floor_P).unsqueeze(1).sub(offsets).abs_()
    near = ((KEYS_A + 2) * distance - (KEYS_A + 3)) * distance * distance + 1
    far = ((KEYS_A * distance - 5 * KEYS_A) * distance + 8 * KEYS_A) * distance - 4 * KEYS_A
    tap = (floor_P.long().unsqueeze(1) + offsets).clamp_(0, side - 1)
    return tap, torch.where(distance <= 1, near, far)


def _empty_tables() -> GridTables:
    none = torch.zeros(0, dtype=torch.int64)
    return GridTables(order_P=none, row_P=none, column_P=none, tap_PB=none.view(0, 16), weight_PB=torch.zeros(0, 16))
