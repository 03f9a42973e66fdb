"""A keyed permutation of 0..n-1 in O(1) memory: a Feistel network over the next power of four, walked until inside.

Own arithmetic rather than ``numpy.random``: the order of a run must not change with a NumPy release (NEP 19 promises
no streams).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFTS = (np.uint64(29), np.uint64(32))


def permute(positions: npt.NDArray[np.int64], *, size: int, key: str) -> npt.NDArray[np.int64]:
    """Return where each position goes in the permutation of ``0..size-1`` that ``key`` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = _round_keys(key)
    values = positions.astype(np.uint64)
    todo = np.arange(values.size)
    while todo.size:
        left, right = values[todo] >> half, values[todo] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= np.uint64(size)]
    return values.astype(np.int64)


def _mix(value: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed = (value + key) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX
    return mixed ^ (mixed >> _SHIFTS[1])


def _round_keys(key: str) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
