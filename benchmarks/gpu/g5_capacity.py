"""G5: a training step without and with a capacity of experts (1.0 and 1.25): tokens a second, rows that are dropped."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.harness import Place, attempt, judged, measure, run_alone
from benchmarks.gpu.ours import made_up, trainer
from benchmarks.gpu.shapes import KI, base, cut

from polyreme_planner.flops import Mix, training_flops
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.routing import Routing

BAR: dict[str, float] = {}
"""None: what a capacity is worth is for the reader; the figures must be there."""
FACTORS: dict[str, float | None] = {"dropless": None, "factor_1.25": 1.25, "factor_1.0": 1.0}
MOE_LAYERS = 2


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Run every factor on the same tokens, naturally routed."""
    shape = cut(base(place), base(place).decoder.dense_layers + MOE_LAYERS, sees=False)
    mix = Mix(sequence_tokens=(4 if place.rehearsal else 4 * KI), visual_share=0)
    packs = 4
    tokens = packs * mix.sequence_tokens
    figures: dict[str, Any] = {
        "tokens": tokens,
        "floor_ms": round(place.floor_ms(training_flops(shape, mix) * tokens, 0), 4),
    }
    for name, factor in FACTORS.items():

        def run(name: str = name, factor: float | None = factor) -> dict[str, Any]:
            with trainer(shape, place, options=ComputeOptions(capacity_factor=factor)) as training:
                inputs = made_up(shape, mix, place, packs=packs)
                timing = measure(lambda: training.step(inputs), place)
                chosen = shape.decoder.experts_per_token
                routed = Routing.from_numbers(training.last.routing_MX).summary(experts_per_token=chosen)
            share = routed.dropped / (tokens * chosen * MOE_LAYERS)
            return {
                f"{name}_tokens_per_s": round(tokens / timing.median_ms * 1e3, 1),
                f"{name}_dropped_ratio": round(share, 5),
                f"{name}_fullest_expert_ratio": round(routed.load_max, 3),
            } | timing.figures(name)

        attempt(figures, name, run)
    ran = all(f"{name}_ms" in figures for name in FACTORS)
    return figures, BAR, judged(figures, BAR, place) and ran


if __name__ == "__main__":
    raise SystemExit(run_alone("g5", bench, __doc__))
