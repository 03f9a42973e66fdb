"""Duplicates: what banding finds is what comparing all pairs finds, whatever the order."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.operations.deduplicate_images import DeduplicateParameters, deduplicate_images
from polyreme_datahub.operations.duplicates import DISTANCE_MAX, duplicates, exact_duplicates


def by_all_pairs(keys: list[str], hashes: list[int], distance_max: int) -> dict[str, str]:
    found = {}
    pairs = sorted(zip(keys, hashes, strict=True))
    for at, (key, value) in enumerate(pairs):
        near = [other for other, theirs in pairs[:at] if (value ^ theirs).bit_count() <= distance_max]
        if near:
            found[key] = near[0]
    return found


@st.composite
def hashed(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """Hashes in clusters: centers, and copies of them with some bits flipped."""
    centers = draw(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
    copies = st.tuples(st.sampled_from(centers), st.lists(st.integers(0, 63), max_size=8))
    hashes = []
    for center, flips in draw(st.lists(copies, max_size=25)):
        flipped = 0
        for bit in flips:
            flipped ^= 1 << bit
        hashes.append(center ^ flipped)
    keys = draw(st.permutations([f"k{at:03d}" for at in range(len(hashes))]))
    return list(keys), hashes


@given(hashed(), st.integers(0, DISTANCE_MAX), st.randoms(use_true_random=False))
def test_banding_finds_what_comparing_all_pairs_finds(
    sample: tuple[list[str], list[int]], distance_max: int, generator: random.Random
) -> None:
    keys, hashes = sample
    found = duplicates(keys, hashes, distance_max=distance_max)
    assert found == by_all_pairs(keys, hashes, distance_max)
    order = list(range(len(keys)))
    generator.shuffle(order)
    assert duplicates([keys[at] for at in order], [hashes[at] for at in order], distance_max=distance_max) == found
    fewer = duplicates(keys[1:], hashes[1:], distance_max=distance_max)
    assert set(fewer) <= set(found), "a key that was added brought one back"


@pytest.mark.slow
def test_many_hashes_take_no_time_per_pair() -> None:
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, 200_000, dtype=np.uint64)
    hashes[150_000:160_000] = hashes[:10_000] ^ np.uint64(7)
    found = duplicates([f"{at:06d}" for at in range(200_000)], hashes.tolist(), distance_max=3)
    assert found == {f"{150_000 + at:06d}": f"{at:06d}" for at in range(10_000)}


def test_a_distance_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match=f"expected 0 to {DISTANCE_MAX}"):
        duplicates(["a"], [1], distance_max=DISTANCE_MAX + 1)


def rows(*images: list[dict[str, str]]) -> list[BarrierRow]:
    return [BarrierRow(ordinal=at, sample_id=f"s{at}", inputs=({"images": one},)) for at, one in enumerate(images)]


@dataclasses.dataclass(frozen=True)
class BarrierRow:
    ordinal: int
    sample_id: str
    inputs: tuple[dict[str, list[dict[str, str]]], ...]


def hashes_of(exact: str, perceptual: int, color: int = 0) -> dict[str, str]:
    return {"exact": exact, "perceptual": f"{perceptual:016x}", "colors": bytes([color] * 48).hex()}


@given(
    st.lists(st.tuples(st.integers(0, 7), st.binary(min_size=3, max_size=3)), max_size=30),
    st.integers(1, 2),
)
def test_near_copies_are_near_in_bits_and_in_every_color(hashes: list[tuple[int, bytes]], distance_max: int) -> None:
    keys = [f"{at:03d}" for at in range(len(hashes))]

    def near(one: int, other: int) -> bool:
        (bits, color), (bits_other, color_other) = hashes[one], hashes[other]
        steps = [abs(a // 16 - b // 16) for a, b in zip(color, color_other, strict=True)]
        return (bits ^ bits_other).bit_count() <= distance_max and max(steps) <= 1

    expected = {
        keys[at]: keys[first]
        for at in range(len(hashes))
        if (first := next(one for one in range(at + 1) if near(one, at))) != at
    }
    bits, colors = [one for one, _ in hashes], [color for _, color in hashes]
    assert duplicates(keys, bits, distance_max=distance_max, colors=colors) == expected


def test_the_barrier_drops_copies_and_near_copies_and_names_the_sample_that_stays() -> None:
    a, near_a, b = hashes_of("a", 0xFFFF), hashes_of("a2", 0xFFFE), hashes_of("b", 0xFFFF0000)
    sample = rows([a], [b], [near_a], [a], [a, b], [], [], [a, b])
    found = deduplicate_images(sample, DeduplicateParameters(distance_max=2))
    assert found == {
        2: "its image is within 2 bits, and in color, of that of s0",
        3: "its images are those of s0",
        7: "its images are those of s4",
    }
    assert set(deduplicate_images(sample, DeduplicateParameters())) == {3, 7}
    other_color = rows([a], [hashes_of("red", 0xFFFF, color=90)], [hashes_of("red2", 0xFFFF, color=100)])
    assert list(deduplicate_images(other_color, DeduplicateParameters(distance_max=2))) == [2]


def test_exact_duplicates_keep_the_smallest_key() -> None:
    assert exact_duplicates(["c", "a", "b", "d"], ["x", "x", "y", "x"]) == {"c": "a", "d": "a"}
