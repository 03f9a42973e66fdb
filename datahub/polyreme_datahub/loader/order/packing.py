"""Packs samples of known lengths into packs of a fixed token count: best-fit decreasing, no state between windows."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Pack every sample; return the samples of each pack, by their place in ``lengths``, ascending.

    Best fit: into the fullest pack that still holds it. Longer samples first; equal ones in order.

    Raises:
        ValueError: If a sample is longer than a pack.
    """
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []
    """(free tokens, pack), ascending."""
    for sample in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        length = lengths[sample]
        if length > capacity:
            raise ValueError(f"sample of {length} tokens in a pack of {capacity}")
        place = bisect.bisect_left(open_packs, (length, -1))
        if place == len(open_packs):
            free, number = capacity, len(packs)
            packs.append([])
        else:
            free, number = open_packs.pop(place)
        packs[number].append(sample)
        if free > length:
            bisect.insort(open_packs, (free - length, number))
    return [sorted(samples) for samples in packs]


def longest_prefix(lengths: Sequence[int], *, capacity: int, packs_max: int) -> tuple[int, list[list[int]]]:
    """Find how many samples, in order, fill ``packs_max`` packs, and pack them.

    Starts from what would fit without a gap, and gives samples back until best-fit decreasing needs no more packs
    than there are.
    """
    total, count = 0, 0
    for length in lengths:
        if total + length > capacity * packs_max:
            break
        total += length
        count += 1
    while True:
        packs = pack(lengths[:count], capacity=capacity)
        over = packs[packs_max:]
        if not over:
            return count, packs
        excess = sum(lengths[sample] for samples in over for sample in samples)
        while excess > 0 and count > 0:
            count -= 1
            excess -= lengths[count]
