"""Time of a batch on unlike devices: an even split with the same bits in all layers over the plan. Computed, not run.

Usage: run.py [--batch 128]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time

from polyreme_planner.flops import Mix
from polyreme_planner.serving import DECODE, PREFILL, SERVING_DEVICES, ServingPlan, even_plan, plan_serving
from polyreme_planner.serving_prices import BITS, Phases, ServingSetting, indicator_without_data
from polyreme_planner.shapes import MOONLIGHT_16B_A3B

LISTS = {
    "h100_a100_a100": ("h100-80g", "a100-80g", "a100-80g"),
    "a100_l40s": ("a100-80g", "l40s-48g"),
    "l40s_l4_l4": ("l40s-48g", "l4-24g", "l4-24g"),
}
PROMPT, ANSWER = 512, 128
BUDGET = 0.5
"""Error that the plan may have beside an even split of 16 bits; beside others it may have theirs."""
BAR = 1.0


def main() -> int:
    """Compare on every list; 0 when the plan is nowhere slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    begin_s = time.perf_counter()
    for name, devices in LISTS.items():
        setting = ServingSetting(
            shape=MOONLIGHT_16B_A3B,
            devices=tuple(SERVING_DEVICES[device] for device in devices),
            phases=Phases(mix=Mix(sequence_tokens=PROMPT, visual_share=0), answer_tokens=ANSWER, batch=options.batch),
            indicator=indicator_without_data(MOONLIGHT_16B_A3B),
            budget=BUDGET,
        )
        figures |= {f"{name}_{key}": round(value, 4) for key, value in compare(setting).items()}
    replayed = {key: value for key, value in figures.items() if "replayed" in key}
    over_16 = [value for key, value in replayed.items() if key.endswith("even_16_ratio")]
    same_error = [value for key, value in replayed.items() if key.endswith("same_error_ratio")]
    figures |= {
        "mean_replayed_over_even_16_ratio": round(statistics.mean(over_16), 4),
        "mean_replayed_same_error_ratio": round(statistics.mean(same_error), 4),
        "least_ratio": min(value for key, value in figures.items() if key.endswith("_ratio")),
        "search_s": round(time.perf_counter() - begin_s, 1),
    }
    ok = figures["least_ratio"] >= BAR
    print(json.dumps({"name": "bench-serving-plan", "figures": figures, "bar": {"least_ratio": BAR}, "ok": ok}))
    return 0 if ok else 1


def compare(setting: ServingSetting) -> dict[str, float]:
    """Compare a plan with even splits: of 16 bits, and of each number of bits with no more error than that has."""
    found: dict[str, float] = {}
    for bits in BITS:
        even = even_plan(setting, bits)
        if even is None:
            continue
        plan = plan_serving(dataclasses.replace(setting, budget=min(1.0, even.error)))
        found |= ratios(f"even_{bits}_same_error", even, plan, setting.phases.batch)
        if bits == max(BITS):
            found |= ratios("even_16", even, plan_serving(setting), setting.phases.batch)
    return found


def ratios(name: str, even: ServingPlan, plan: ServingPlan, batch: int) -> dict[str, float]:
    """Return how much longer an even split takes: by the planner's formula, and step by step."""
    used = ", ".join(f"{stage.hardware.name} {len(stage.bits)}" for stage in plan.stages)
    print(f"{name:20} even {even.total_s:7.3f} s, plan {plan.total_s:7.3f} s: {used}", file=sys.stderr)
    return {
        f"over_{name}_ratio": even.total_s / plan.total_s,
        f"replayed_over_{name}_ratio": replayed_s(even, batch) / replayed_s(plan, batch),
    }


def replayed_s(plan: ServingPlan, batch: int) -> float:
    """Replay a batch: a stage takes microbatches in their order, and each token waits for the one before it.

    All of prefill is before the first step of decode, as the planner has it.
    """
    ends = 0.0
    for phase, passes in ((PREFILL, 1), (DECODE, ANSWER - 1)):
        groups = math.ceil(batch / plan.sequences[phase])
        free_s, ready_s = [ends] * len(plan.stages), [ends] * groups
        for _ in range(passes):
            for group in range(groups):
                for at, stage in enumerate(plan.stages):
                    free_s[at] = max(free_s[at], ready_s[group]) + stage.seconds[phase]
                    ready_s[group] = free_s[at]
        ends = max(ready_s)
    return ends


if __name__ == "__main__":
    sys.exit(main())
