"""How full packs are, beside two other packers on the same stream of samples, and how unequal their cost is over ranks.

Usage: run.py [--steps 32] [--seeds 3]
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from polyreme_datahub.loader.order import Order, OrderPlan, Segment
from polyreme_planner.flops import Mix, core_flops, forward_flops, image_flops
from polyreme_planner.model_parts import Part, all_parts
from polyreme_planner.shapes import PRESETS

SHAPE = PRESETS["kimi-vl-a3b"]
SOURCES = (("captions", 3, 6.3, 0.7, 0.8), ("documents", 1, 8.0, 0.9, 0.6), ("text", 2, 7.0, 1.2, 0.0))
"""Name, weight, mean and deviation of the logarithm of a sample's tokens, share of image tokens."""
SAMPLES, PACKS_PER_STEP, BUFFER_SAMPLES = 30_000, 64, 1_000
IMAGE_TOKENS, PATCHES_PER_TOKEN = 1_024, 4
SPLITS = ((8_192, 8), (32_768, 32), (131_072, 8))
"""Tokens of a pack, and data-parallel ranks."""
FILL_8K_MIN = 0.995


def main() -> int:
    """Measure, and print one line of JSON; 0 when packs of 8k tokens are full enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, float] = {"steps": options.steps, "seeds": options.seeds}
    for capacity, ranks in SPLITS:
        runs = [measure(capacity, ranks, options.steps, seed) for seed in range(options.seeds)]
        for key in runs[0]:
            figures[f"{key}_{capacity // 1024}k"] = round(statistics.median(run[key] for run in runs), 4)
    ok = figures["fill_8k"] >= FILL_8K_MIN
    print(json.dumps({"name": "bench-packing", "figures": figures, "bar": {"fill_8k": FILL_8K_MIN}, "ok": ok}))
    return 0 if ok else 1


def measure(capacity: int, ranks: int, steps: int, seed: int) -> dict[str, float]:
    """Pack some steps, and the very samples of these steps again by the others."""
    random = np.random.default_rng(seed)
    lengths = [
        np.clip(random.lognormal(mean, deviation, SAMPLES).astype(np.int64), 16, capacity)
        for _, _, mean, deviation, _ in SOURCES
    ]
    plan = OrderPlan(
        seed=seed,
        names=tuple(name for name, *_ in SOURCES),
        lengths=tuple(lengths),
        segments=(Segment(first_step=1, weights=tuple(weight for _, weight, *_ in SOURCES)),),
        packs_per_step=PACKS_PER_STEP,
        pack_tokens=capacity,
    )
    order = Order(plan)
    packs = [
        [(slot.source, int(lengths[slot.source][slot.sample])) for slot in slots]
        for step in range(1, steps + 1)
        for slots in order.packs(step)
    ]
    # The others get the samples in an order by chance, as a shuffled stream has them.
    stream = [length for pack in packs for _, length in pack]
    random.shuffle(stream)
    costs = np.array([cost(pack, capacity) for pack in packs]).reshape(steps, ranks, -1)
    return {
        "fill": fill((sum(length for _, length in pack) for pack in packs), capacity),
        "next_fit_fill": fill(next_fit(stream, capacity), capacity),
        "knapsack_fill": fill(knapsacks(stream, capacity), capacity),
        "imbalance": imbalance(costs),
    }


def fill(tokens: Iterable[int], capacity: int) -> float:
    """Mean share of the packs that holds samples."""
    counted = list(tokens)
    return sum(counted) / (len(counted) * capacity)


def next_fit(stream: list[int], capacity: int) -> Iterator[int]:
    """Tokens of packs that end where the next sample does not fit."""
    held = 0
    for length in stream:
        if held + length > capacity:
            yield held
            held = 0
        held += length


def knapsacks(stream: list[int], capacity: int) -> Iterator[int]:
    """Tokens of packs that take the longest sample of a buffer that fits, again and again, buffer after buffer."""
    for first in range(0, len(stream) - BUFFER_SAMPLES + 1, BUFFER_SAMPLES):
        waiting = sorted(stream[first : first + BUFFER_SAMPLES])
        while waiting:
            held = 0
            while (at := bisect.bisect_right(waiting, capacity - held)) > 0:
                held += waiting.pop(at - 1)
            yield held


def cost(pack: list[tuple[int, int]], capacity: int) -> float:
    """Operations of a pack's forward: products of all its tokens, attention within each document, its images."""
    found = capacity * LINEAR
    for source, length in pack:
        image_tokens = int(length * SOURCES[source][4])
        whole, rest = divmod(image_tokens, IMAGE_TOKENS)
        found += ATTENTION * length**2 + whole * image_flops(SHAPE, PATCHES_PER_TOKEN * IMAGE_TOKENS)
        found += image_flops(SHAPE, PATCHES_PER_TOKEN * rest) if rest else 0.0
    padding = capacity - sum(length for _, length in pack)
    return found + ATTENTION * padding**2


def imbalance(cost_SRM: npt.NDArray[np.float64]) -> float:
    """Cost of steps [S] whose ranks [R] wait for the slowest after each microbatch [M], over their mean cost."""
    return float(np.mean(cost_SRM.max(axis=1).sum(axis=1) / cost_SRM.mean(axis=1).sum(axis=1)))


_FORWARD = forward_flops(SHAPE, Mix(sequence_tokens=1, visual_share=0.0))
LINEAR = sum(_FORWARD[part] for part in all_parts(SHAPE) if part is not Part.TOWER)
"""Operations of a token, without attention's core and the tower."""
ATTENTION = core_flops(SHAPE, Mix(sequence_tokens=1)) * sum(part in (Part.DENSE, Part.MOE) for part in all_parts(SHAPE))
"""Operations of attention's core, for a document of one token; they grow with the square of its length."""

if __name__ == "__main__":
    raise SystemExit(main())
