"""Fullness of packs, beside two other packers on the same stream of samples, and imbalance of their cost over ranks.

Usage: run.py [--steps 32] [--seeds 3]
"""

from __future__ import annotations

import argparse
import bisect
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from polyreme_datahub.loader.order.balance import StepSplit, assign_packs, slowest
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_planner.flops import Mix, core_flops, forward_flops, uneven_flops
from polyreme_planner.mixture import Segment
from polyreme_planner.model_parts import Part, all_parts
from polyreme_planner.shapes import PRESETS

SHAPE = PRESETS["kimi-vl-a3b"]
SOURCES = (("captions", 3, 6.3, 0.7, 0.8), ("documents", 1, 8.0, 0.9, 0.6), ("text", 2, 7.0, 1.2, 0.0))
"""Name, weight, mean and deviation of the logarithm of a sample's tokens, share of image tokens."""
SAMPLES, BUFFER_SAMPLES = 30_000, 1_000
IMAGE_TOKENS, PATCHES_PER_TOKEN = 1_024, 4
CASES = {
    "8k": (8_192, 64, 8),
    "32k": (32_768, 64, 32),
    "32k_4_packs_a_rank": (32_768, 128, 32),
    "128k": (131_072, 64, 8),
}
"""Tokens of a pack, packs of a step, and data-parallel ranks."""
FILL_8K_MIN = 0.995
BALANCED_8K_MAX = 1.05


def main() -> int:
    """Measure, and print one line of JSON; 0 when packs of 8k tokens are full and balanced enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, float] = {"steps": options.steps, "seeds": options.seeds}
    for case, sizes in CASES.items():
        runs = [measure(*sizes, options.steps, seed) for seed in range(options.seeds)]
        for key in runs[0]:
            figures[f"{key}_{case}"] = round(statistics.median(run[key] for run in runs), 4)
    ok = figures["fill_8k"] >= FILL_8K_MIN and figures["balanced_imbalance_ratio_8k"] <= BALANCED_8K_MAX
    bar = {"fill_8k": FILL_8K_MIN, "balanced_imbalance_ratio_8k": BALANCED_8K_MAX}
    print(json.dumps({"name": "bench-packing", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def measure(capacity: int, count: int, ranks: int, steps: int, seed: int) -> dict[str, float]:
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
        packs_per_step=count,
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
    costs = [[cost(pack, capacity) for pack in packs[at : at + count]] for at in range(0, len(packs), count)]
    return {
        "fill": fill((sum(length for _, length in pack) for pack in packs), capacity),
        "next_fit_fill": fill(next_fit(stream, capacity), capacity),
        "knapsack_fill": fill(knapsacks(stream, capacity), capacity),
        **imbalances(costs, StepSplit(data_ranks=ranks, microbatches=count // ranks), ""),
        **imbalances(costs, StepSplit(data_ranks=ranks), "_at_end"),
    }


def imbalances(costs: Sequence[Sequence[int]], split: StepSplit, suffix: str) -> dict[str, float]:
    """Imbalance of the order's assignment, of the loader's, and of two that it could be instead."""
    balanced = [[step[pack] for pack in assign_packs(step, split)] for step in costs]
    return {
        f"imbalance{suffix}_ratio": imbalance(costs, split),
        f"balanced_imbalance{suffix}_ratio": imbalance(balanced, split),
        f"snake_imbalance{suffix}_ratio": imbalance([snake(step, split.data_ranks) for step in costs], split),
        f"lpt_imbalance{suffix}_ratio": imbalance([longest_first(step, split.data_ranks) for step in costs], split),
    }


def snake(costs: Sequence[int], ranks: int) -> list[int]:
    """Deal packs, dearest first, to the ranks there and back again."""
    dearest = sorted(costs, reverse=True)
    rounds = [dearest[at : at + ranks][:: -1 if at // ranks % 2 else 1] for at in range(0, len(costs), ranks)]
    return [cost for mine in zip(*rounds, strict=True) for cost in mine]


def longest_first(costs: Sequence[int], ranks: int) -> list[int]:
    """Give each pack, dearest first, to the rank that has the least and has room (LPT with equal counts)."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    for pack in sorted(costs, reverse=True):
        min((mine for mine in held if len(mine) < len(costs) // ranks), key=sum).append(pack)
    return [cost for mine in held for cost in mine]


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


def cost(pack: list[tuple[int, int]], capacity: int) -> int:
    """Operations of a pack's forward: products of all its tokens, attention within each document, its images."""
    images: list[int] = []
    for source, length in pack:
        whole, rest = divmod(int(length * SOURCES[source][4]), IMAGE_TOKENS)
        images += [PATCHES_PER_TOKEN * IMAGE_TOKENS] * whole + [PATCHES_PER_TOKEN * rest] * (rest > 0)
    documents = [length for _, length in pack]
    return capacity * LINEAR + uneven_flops(SHAPE, [*documents, capacity - sum(documents)], images)


def imbalance(costs: Sequence[Sequence[int]], split: StepSplit) -> float:
    """Cost of steps whose ranks wait for the slowest after each microbatch, over their mean cost."""
    return statistics.mean(slowest(step, split) * split.data_ranks / sum(step) for step in costs)


_FORWARD = forward_flops(SHAPE, Mix(sequence_tokens=1, visual_share=0.0))
_CORE = core_flops(SHAPE, Mix(sequence_tokens=1))
LINEAR = int(
    sum(
        _FORWARD[part] - _CORE * (part in {Part.DENSE, Part.MOE}) for part in all_parts(SHAPE) if part is not Part.TOWER
    )
)
"""Operations of a token, without attention's core and the tower."""

if __name__ == "__main__":
    raise SystemExit(main())
