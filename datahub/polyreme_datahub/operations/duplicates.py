"""Finds duplicates among hashes: pure, the same for any order of its arguments; the smallest key survives.

A key survives if no smaller key is within the distance. So a key that is added later can only drop further ones, and
brings none back: what was decided stays right when a sample is replayed. In a chain of near copies only the smallest
key survives.

Two hashes of 64 bits that differ in at most ``d`` of them agree on at least 2 of ``d + 2`` bands. So each choice of 2
bands sorts all hashes by those bits, and only equal neighbours are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from polyreme_api.errors import InvalidConfigError

BITS = 64
BANDS_EQUAL = 2
SAMPLE = 65_536
DISTANCE_MAX = 6
COLOR_STEP = 16
"""Levels of 256 that count as one step of a color; near copies differ by one step at most, everywhere."""
PAIRS_MAX = 50_000_000
"""Pairs of different hashes within the distance: 0.8 GB."""


def exact_duplicates(keys: Sequence[str], digests: Sequence[str]) -> dict[str, str]:
    """Return each key that has a smaller one with the same digest, with the smallest such."""
    first: dict[str, str] = {}
    found = {}
    for key, digest in sorted(zip(keys, digests, strict=True)):
        survivor = first.setdefault(digest, key)
        if survivor != key:
            found[key] = survivor
    return found


def duplicates(
    keys: Sequence[str], hashes: Sequence[int], *, distance_max: int, colors: Sequence[bytes] = ()
) -> dict[str, str]:
    """Return the keys that don't survive, each with the smallest key within the distance.

    Args:
        keys: Different keys.
        hashes: The 64-bit hash of each.
        distance_max: Most bits in which two duplicates differ.
        colors: Of each, as many bytes; none: colors are not compared.

    Raises:
        InvalidConfigError: If the distance is too large, or makes too many pairs.
    """
    if not 0 <= distance_max <= DISTANCE_MAX:
        raise InvalidConfigError(
            f"distance_max is {distance_max}, expected 0 to {DISTANCE_MAX} of {BITS} bits", field="distance_max"
        )
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ranked = np.array([hashes[at] for at in order], dtype="<u8").view(np.uint8).reshape(len(keys), 8)
    steps = np.frombuffer(b"".join(colors[at] for at in order) if colors else b"", dtype=np.uint8) // COLOR_STEP
    both = np.hstack([ranked, steps.reshape(len(keys), -1)]) if len(keys) and colors else ranked
    unique, first, places = np.unique(both, axis=0, return_index=True, return_inverse=True)
    seen = _Seen(hashes=unique[:, :8].copy().view("<u8").ravel(), colors=unique[:, 8:].astype(np.int16))
    pairs = _near_pairs(seen, distance_max)
    smallest = first.copy()
    np.minimum.at(smallest, pairs[:, 0], first[pairs[:, 1]])
    np.minimum.at(smallest, pairs[:, 1], first[pairs[:, 0]])
    survivors = np.minimum(np.arange(len(keys)), smallest[places.ravel()])
    return {
        keys[order[rank]]: keys[order[survivor]] for rank, survivor in enumerate(survivors.tolist()) if survivor != rank
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Different pairs of a hash and its colors."""

    hashes: npt.NDArray[np.uint64]
    colors: npt.NDArray[np.int16]

    def are_near(
        self, one: npt.NDArray[np.intp], other: npt.NDArray[np.intp], distance_max: int
    ) -> npt.NDArray[np.bool_]:
        near: npt.NDArray[np.bool_] = np.bitwise_count(self.hashes[one] ^ self.hashes[other]) <= distance_max
        near[near] = (np.abs(self.colors[one[near]] - self.colors[other[near]]) <= 1).all(axis=1)
        return near


def _near_pairs(seen: _Seen, distance_max: int) -> npt.NDArray[np.int64]:
    """Return all pairs within the distance, once each, as places in ``seen``."""
    codes = np.zeros(0, dtype=np.int64)
    for mask in _masks(seen.hashes, distance_max) if distance_max and seen.hashes.size else ():
        codes = np.unique(np.concatenate([codes, *_pairs_equal_in(seen, mask, distance_max)]))
        if codes.size > PAIRS_MAX:
            raise InvalidConfigError(
                f"more than {PAIRS_MAX} pairs of hashes are within {distance_max} bits", field="distance_max"
            )
    return np.stack(np.divmod(codes, max(1, len(seen.hashes))), axis=1)


def _pairs_equal_in(seen: _Seen, mask: np.uint64, distance_max: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the near pairs among the hashes that are equal in the bits of a mask."""
    masked = seen.hashes & mask
    order = np.argsort(masked)
    for at, step in _equal_neighbours(masked[order]):
        one, other = order[at], order[at + step]
        near = seen.are_near(one, other, distance_max)
        one, other = one[near].astype(np.int64), other[near].astype(np.int64)
        yield np.minimum(one, other) * len(seen.hashes) + np.maximum(one, other)


def _equal_neighbours(sorted_values: npt.NDArray[np.uint64]) -> Iterator[tuple[npt.NDArray[np.intp], int]]:
    """Yield, for each distance between places, the places whose value is equal to that at this distance."""
    at, step = np.arange(len(sorted_values)), 0
    while at.size:
        step += 1
        at = at[at < len(sorted_values) - step]
        at = at[sorted_values[at] == sorted_values[at + step]]
        if at.size:
            yield at, step


def _masks(unique: npt.NDArray[np.uint64], distance_max: int) -> Iterator[np.uint64]:
    """Yield the bits of each choice of bands. Bits are dealt out by how much they vary, so that bands split alike."""
    bands = distance_max + BANDS_EQUAL
    sample = unique[:: max(1, len(unique) // SAMPLE)]
    shares = [float(((sample >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(BITS)]
    order = sorted(range(BITS), key=lambda bit: (abs(shares[bit] - 0.5), bit))
    parts = [sum(1 << bit for bit in order[band::bands]) for band in range(bands)]
    for chosen in itertools.combinations(parts, BANDS_EQUAL):
        yield np.uint64(sum(chosen))
