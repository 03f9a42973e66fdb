"""G6: time against memory of what layers recompute: none, selective, full; and what the planner expected of each.

torchtitan's selective and budgeted policies are not run: they are rules for its own model, whose step G1 has.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.harness import Place, attempt, judged, measure, run_alone
from benchmarks.gpu.ours import made_up, trainer
from benchmarks.gpu.shapes import KI, base, cut, planned

from polyreme_planner.costs import Recompute
from polyreme_planner.flops import Mix, training_flops
from polyreme_planner.hardware import GIB
from polyreme_trainer.model.compute_options import ComputeOptions

BAR: dict[str, float] = {}
PLANNED_MIN, PLANNED_MAX = 0.8, 1.25
"""Planned over measured memory: beyond it the planner would refuse what fits, or admit what does not."""
MOE_LAYERS = 3


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Run every way on the same tokens."""
    shape = cut(base(place), base(place).decoder.dense_layers + MOE_LAYERS - place.rehearsal)
    mix = Mix(
        sequence_tokens=(64 if place.rehearsal else 16 * KI),
        image_patches=64 if place.rehearsal else 1024,
        visual_share=0.25,
    )
    figures: dict[str, Any] = {
        "tokens": mix.sequence_tokens,
        "floor_ms": round(place.floor_ms(training_flops(shape, mix) * mix.sequence_tokens, 0), 4),
        "torchtitan_selective_skipped": "a rule for its own model",
    }
    for recompute in Recompute:
        name = str(recompute)

        def run(recompute: Recompute = recompute, name: str = name) -> dict[str, Any]:
            with trainer(shape, place, options=ComputeOptions(recompute=recompute)) as training:
                inputs = made_up(shape, mix, place, packs=1)
                timing = measure(lambda: training.step(inputs), place)
            held_gib = planned(shape, mix, place.hardware, packs=1, recompute=recompute).total_bytes / GIB
            figures_of_case = {f"{name}_planned_gib": round(held_gib, 3)}
            if timing.peak_gib:
                figures_of_case[f"{name}_planned_over_measured_ratio"] = round(held_gib / timing.peak_gib, 3)
            return figures_of_case | timing.figures(name)

        attempt(figures, name, run)
    ratios = [value for key, value in figures.items() if key.endswith("planned_over_measured_ratio")]
    fit = place.rehearsal or (len(ratios) == len(Recompute) and all(PLANNED_MIN <= r <= PLANNED_MAX for r in ratios))
    ran = all(f"{recompute}_ms" in figures for recompute in Recompute)
    return figures, BAR, ran and fit and judged(figures, BAR, place)


if __name__ == "__main__":
    raise SystemExit(run_alone("g6", bench, __doc__))
