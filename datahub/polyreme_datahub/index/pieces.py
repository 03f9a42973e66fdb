"""Pieces of samples that are longer than a pack: the first one, or one after the other. Pure.

A piece is a run of a sample's tokens. It never holds a part of an image: where one does not fit any more, the piece
ends before it. A piece from which nothing is learned is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TRUNCATE, SPLIT, REFUSE = "Truncate", "Split", "Refuse"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of a sample's tokens."""

    start: int
    stop: int
    images: range
    """The images that are in it."""


def piece_at(spans: Sequence[Sequence[int]], start: int, stop: int) -> Piece:
    """Return the piece between two tokens, with the images that lie there as a whole."""
    inside = [image for image, (first, last) in enumerate(spans) if start <= first and last <= stop]
    return Piece(start=start, stop=stop, images=range(inside[0], inside[-1] + 1) if inside else range(0))


def pieces_of(
    learned_T: npt.NDArray[np.uint8], spans: Sequence[Sequence[int]], *, tokens_max: int, policy: str
) -> list[Piece]:
    """Cut a sample.

    Args:
        learned_T: A one for each token that is learned.
        spans: First token of each image, and the one after its last, in order.
        tokens_max: Most tokens of a piece.
        policy: ``Truncate``: the first piece alone; ``Split``: all; ``Refuse``: none.

    Returns:
        Those of them from which something is learned; none where an image alone is longer than a piece.
    """
    if policy == REFUSE or any(last - first > tokens_max for first, last in spans):
        return []
    found, start, end = [], 0, len(learned_T)
    while start < end:
        stop = min(end, start + tokens_max)
        stop = next((first for first, last in spans if first < stop < last), stop)
        # The first token of a piece follows nothing from which it could be learned.
        if learned_T[start + 1 : stop].any():
            found.append(piece_at(spans, start, stop))
        if policy == TRUNCATE:
            break
        start = stop
    return found
