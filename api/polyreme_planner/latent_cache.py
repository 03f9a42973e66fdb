"""Latents that answers keep of their tokens, in one layer: how they are held, and how many bytes that takes."""

from __future__ import annotations

import enum

from polyreme_planner.shapes import DecoderShape

TILE = 128
"""Numbers of a latent that share a scale in 8 bits."""
SCALE_BYTES = 4


class CacheKind(enum.StrEnum):
    """How latents are held."""

    AUTO = "Auto"
    """In the type of the computation."""
    INT8 = "Int8"
    """In 8 bits, rotated keys as they are."""


def tiles_of(shape: DecoderShape) -> tuple[int, int]:
    """Return how many tiles a latent has, and the numbers of one; the last tile may be partly empty."""
    numbers = min(TILE, shape.kv_rank)
    return -(-shape.kv_rank // numbers), numbers


def token_bytes(shape: DecoderShape, kind: CacheKind, *, number_bytes: int) -> int:
    """Count the bytes of one token: its latent and its rotated key (arXiv:2405.04434, section 2.1).

    Args:
        shape: Of the decoder.
        kind: How latents are held.
        number_bytes: Of a number of the computation.
    """
    key = shape.rope_dim * number_bytes
    if kind is CacheKind.AUTO:
        return shape.kv_rank * number_bytes + key
    tiles, numbers = tiles_of(shape)
    return tiles * (numbers + SCALE_BYTES) + key
