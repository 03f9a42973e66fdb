"""Fill a rank's tensors from files of weights, slice by slice.

Files of a folder are mapped, not read: a part is copied straight from the file's pages to its place, and converted to
the model's type on the way. A mapping is closed after ``MAPPED_BYTES_MAX``, so that a rank holds its own shard and of
the files never more than that or one tensor. Parts of objects are read by ranges (``locations.py``), one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from safetensors import SafetensorError
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.rank_page import advance
from polyreme_trainer.weights import FIELD, fp8_blocks, packed_int4
from polyreme_trainer.weights.catalogue import Catalogue, unreadable
from polyreme_trainer.weights.compatibility import Names
from polyreme_trainer.weights.locations import BadFileError, Opened
from polyreme_trainer.weights.slices import Piece, Place, Rows, pieces
from polyreme_trainer.weights.stored import Stored

MAPPED_BYTES_MAX = 64 << 20
"""Bytes of parts that are copied before the file is closed and opened again, unless one part is larger."""


@torch.no_grad()
def load_weights(held: Mapping[str, Rows], catalogue: Catalogue, names: Names, place: Place) -> int:
    """Fill a rank's tensors in place; those that are not in the scheme of names keep their values.

    Args:
        held: Rows of the rank's tensors by their names in the whole model, on any device; experts stacked.
        catalogue: Location of the weights; they fit the model (``compatibility.check_fit``).
        names: Scheme of their names.
        place: Which slices ``held`` are.

    Returns:
        Scalars that were filled.

    Raises:
        InvalidConfigError: If a file is damaged, or a weight is not finite.
    """
    named = ((piece, names.of(piece.source)) for piece in pieces(held, place))
    known = [_Known(piece, name, catalogue.tensors[name]) for piece, name in named if name in catalogue.tensors]
    known.sort(key=lambda part: part.stored.file)
    for file, parts in itertools.groupby(known, key=lambda part: part.stored.file):
        for window in _windows(parts):
            _copy(catalogue, file, window)
            advance()
    return sum(part.piece.own.numel() for part in known)


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """A piece whose tensor was found."""

    piece: Piece
    name: str
    stored: Stored


def _windows(parts: Iterator[_Known]) -> Iterator[list[_Known]]:
    """Group parts to at most ``MAPPED_BYTES_MAX`` of the file, each group at least one."""
    window: list[_Known] = []
    mapped = 0
    for part in parts:
        # A part of some columns touches every page of its tensor.
        if window and mapped + part.stored.size_bytes > MAPPED_BYTES_MAX:
            yield window
            window, mapped = [], 0
        window.append(part)
        mapped += part.stored.size_bytes
    if window:
        yield window


def _copy(catalogue: Catalogue, file: str, window: Sequence[_Known]) -> None:
    folder = catalogue.folder
    try:
        with folder.opened(file) as opened:
            for part in window:
                _fill(part, opened, catalogue)
    except (SafetensorError, BadFileError) as error:
        raise unreadable(folder, file, error) from error


def _fill(known: _Known, file: Opened, catalogue: Catalogue) -> None:
    piece, name = known.piece, known.name
    end = piece.start + piece.own.shape[piece.dim]
    if known.stored.dtype == packed_int4.DTYPE:
        part = _unpacked(known, file, catalogue)
    else:
        stored = file.get_slice(name)
        rows = slice(piece.row, piece.row + piece.own.shape[0])
        part = stored[rows, piece.start : end] if piece.dim else stored[piece.start : end]
    if known.stored.dtype == fp8_blocks.DTYPE:
        first = (piece.row, piece.start) if piece.dim else (piece.start, 0)
        scales = _scales(known, fp8_blocks.SCALES, file, catalogue)
        part = fp8_blocks.scaled(part, scales, first=first, sides=fp8_blocks.block_sides(catalogue.config))
    piece.own.copy_(part)
    if piece.own.numel() and not all(bound.isfinite() for bound in piece.own.aminmax()):
        raise not_finite(name, file.get_tensor(name))


def _unpacked(known: _Known, file: Opened, catalogue: Catalogue) -> Tensor:
    """Read a part of a weight in 4 bits."""
    piece, (_, inputs) = known.piece, known.stored.shape
    first = piece.start if piece.dim else 0
    columns = piece.own.shape[1] if piece.dim else inputs
    begin = piece.row if piece.dim else piece.start
    rows = slice(begin, begin + piece.own.shape[0])
    words = file.get_slice(f"{known.name}{packed_int4.WORDS}")
    scales = _scales(known, packed_int4.SCALES, file, catalogue)
    return packed_int4.scaled(
        words[rows, packed_int4.columns_of_words(first, first + columns)],
        scales[rows],
        first=first,
        columns=columns,
        group=inputs // scales.shape[1],
    )


def _scales(known: _Known, suffix: str, file: Opened, catalogue: Catalogue) -> Tensor:
    """Read the scales of a weight, which may lie in another file; a weight in 4 bits is finite if they are."""
    name, place = f"{known.name}{suffix}", known.stored.scales
    with contextlib.nullcontext(file) if place == known.stored.file else catalogue.folder.opened(place) as opened:
        scales = opened.get_tensor(name)
    if not scales.isfinite().all():
        raise not_finite(name, scales)
    return scales


def not_finite(name: str, whole: Tensor) -> InvalidConfigError:
    """Count the values that are not finite in the whole tensor, so that ranks with different slices report the same."""
    whole = whole.float()
    nans, infinities = int(whole.isnan().sum()), int(whole.isinf().sum())
    return InvalidConfigError(
        f"weights are not finite: {name} has {nans} NaN and {infinities} Inf among {whole.numel()} values, "
        "expected none",
        field=FIELD,
    )
