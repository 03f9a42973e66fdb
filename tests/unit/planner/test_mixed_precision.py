"""Precision of a slow device beside a fast one: limits hold, and at least half of the best is reached."""

from __future__ import annotations

import itertools
import random

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import HARDWARE
from polyreme_planner.mixed_precision import WIDTHS, Allocation, Cost, Costs, allocate, precision_for
from polyreme_planner.shapes import MOONLIGHT_16B_A3B

LAYERS = 6


def drawn(seed: int) -> tuple[list[Costs], Cost]:
    """Layers whose wider numbers cost more time and memory, and leave less variance."""
    rng = random.Random(seed)
    rows: list[Costs] = []
    for _ in range(LAYERS):
        step_s, size, variance = rng.uniform(0.5, 2), rng.uniform(0.5, 2), rng.uniform(0.5, 2)
        rows.append(
            {
                8: Cost(step_s, size, variance),
                16: Cost(step_s * 2, size * 2, variance * rng.uniform(0.05, 0.2)),
                32: Cost(step_s * 12, size * 4, 0.0),
            }
        )
    return rows, Cost(rng.uniform(0, 2), rng.uniform(0, 2), 0.0)


def all_low(rows: list[Costs], fixed: Cost) -> Allocation:
    return allocate(rows, fixed=fixed, limit_s=0, memory_bytes=0)


def best_variance(rows: list[Costs], fixed: Cost, limit_s: float, memory_bytes: float) -> float:
    found = []
    for widths in itertools.product(WIDTHS, repeat=LAYERS):
        chosen = [fixed, *(row[width] for row, width in zip(rows, widths, strict=True))]
        if sum(cost.step_s for cost in chosen) <= limit_s and sum(cost.memory_bytes for cost in chosen) <= memory_bytes:
            found.append(sum(cost.variance for cost in chosen))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_the_slow_device_keeps_up_and_removes_half_of_what_the_best_choice_does(seed: int) -> None:
    rows, fixed = drawn(seed)
    low = all_low(rows, fixed)
    limit_s = low.step_s * random.Random(seed).uniform(0.8, 6)
    found = allocate(rows, fixed=fixed, limit_s=limit_s, memory_bytes=1e9)
    assert found.step_s <= max(limit_s, low.step_s) * (1 + 1e-9)
    best = best_variance(rows, fixed, found.limit_s, 1e9)
    assert low.variance - found.variance >= 0.5 * (low.variance - best) - 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_memory_holds_too_and_nothing_is_worse_than_the_fewest_bits(seed: int) -> None:
    rows, fixed = drawn(seed)
    low = all_low(rows, fixed)
    memory_bytes = low.memory_bytes * 1.4
    found = allocate(rows, fixed=fixed, limit_s=low.step_s * 3, memory_bytes=memory_bytes)
    assert found.memory_bytes <= memory_bytes
    assert found.step_s <= low.step_s * 3 * (1 + 1e-9)
    assert found.variance <= low.variance


def chosen(slow: str, fast: str, *, packs: int = 1) -> Allocation:
    mix = Mix(sequence_tokens=4096, visual_share=0)
    return precision_for(MOONLIGHT_16B_A3B, mix, slow=HARDWARE[slow], fast=HARDWARE[fast], packs=packs, state_bytes=1e9)


def test_the_slower_the_device_the_more_of_its_layers_have_few_bits() -> None:
    near, far = chosen("l40s-48g", "a100-80g"), chosen("l40s-48g", "h100-80g")
    assert 0 < near.widths.count(16) < 27
    assert near.step_s <= near.limit_s
    assert set(far.widths) == {8}, "even so it is the slower one"
    assert far.step_s == far.limit_s
    assert set(chosen("a100-80g", "a100-80g").widths) == {16}


def test_short_memory_is_refused_with_what_is_missing() -> None:
    with pytest.raises(InvalidConfigError, match=r"moonlight-16b-a3b does not fit l4-24g: .* is [0-9.]+ GiB short"):
        chosen("l4-24g", "l40s-48g")
