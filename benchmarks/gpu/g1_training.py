"""G1: a training step of Kimi-VL-A3B at full width, cut in depth: tokens a second, MFU, memory.

MFU is by our closed formula (``polyreme_planner.flops``) for all, against the data sheet's dense bfloat16 rate.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.harness import Place, Timing, attempt, attempt_peer, judged, measure, run_alone, say_figures
from benchmarks.gpu.ours import balance, made_up, trainer
from benchmarks.gpu.peers import torchtitan_step, transformers_step
from benchmarks.gpu.shapes import KI, base, cut, deepest, planned

from polyreme_planner.costs import Recompute
from polyreme_planner.flops import Mix, model_flops_utilisation, training_flops
from polyreme_planner.hardware import GIB
from polyreme_planner.model_parts import parameter_count
from polyreme_planner.shapes import ModelShape

BAR = {"text_4k_balanced_ours_mfu": 0.28}
"""What eight H100 make of Qwen3-30B-A3B by NeMo AutoModel's published figure, exchanges between them included: a single
device that exchanges nothing must do better."""
MFU_MAX = 0.85
"""Beyond it a clock or a formula is wrong."""
STATE_BYTES = 46
"""Bytes that an update moves for a parameter at least: gradient made, squared and read again (12), original and both
moments read and written (24), weight written and read by forward and backward (6), gradient cleared (4)."""


ROUTINGS = ("natural", "balanced")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its packs."""

    name: str
    shape: ModelShape
    mix: Mix
    packs: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.packs * self.mix.sequence_tokens


def cases(place: Place) -> dict[str, tuple[bool, Mix, int]]:
    """Of each case: whether there are images, the mix, packs."""
    k, few = (16, 2) if place.rehearsal else (KI, 4)
    return {
        "text_4k": (False, Mix(sequence_tokens=4 * k, visual_share=0), few),
        "text_32k": (False, Mix(sequence_tokens=32 * k, visual_share=0), 1),
        "images_4k": (True, Mix(sequence_tokens=4 * k, image_patches=64 if place.rehearsal else 1024), 2),
    }


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Run all cases, natural and balanced: ours on one model for all cases that it serves, then each peer."""
    layers = deepest(place)
    figures: dict[str, Any] = {"layers": layers}
    every = [
        Case(name=name, shape=cut(base(place), layers, sees=sees), mix=mix, packs=packs)
        for name, (sees, mix, packs) in cases(place).items()
    ]
    for case in every:
        figures |= limits(case, place)
    for sees in (False, True):
        some = [case for case in every if case.shape.sees is sees]
        attempt(figures, "images_ours" if sees else "text_ours", functools.partial(ours, figures, some, place))
    for case in every:
        if case.shape.sees:
            figures[f"{case.name}_peers"] = "none: towers are compared in g3, decoders in the text cases"
        else:
            peers(figures, case, place)
    highest = max((value for key, value in figures.items() if key.endswith("_mfu")), default=0.0)
    figures["highest_mfu"] = highest
    ran = all(f"{case.name}_{routing}_ours_ms" in figures for case in every for routing in ROUTINGS)
    return figures, BAR, ran and judged(figures, BAR, place) and highest < MFU_MAX


def limits(case: Case, place: Place) -> dict[str, Any]:
    """Derive what a step takes at least, and what memory the planner expects."""
    parameters = parameter_count(case.shape)
    held = planned(case.shape, case.mix, place.hardware, packs=case.packs, recompute=Recompute.NONE).total_bytes
    return {
        f"{case.name}_parameters": parameters,
        f"{case.name}_tokens": case.tokens,
        f"{case.name}_floor_ms": round(place.floor_ms(training_flops(case.shape, case.mix) * case.tokens, 0), 3),
        f"{case.name}_update_floor_ms": round(place.floor_ms(0, STATE_BYTES * parameters), 3),
        f"{case.name}_planned_gib": round(held / GIB, 3),
    }


def figures_of(case: Case, name: str, timing: Timing, place: Place) -> dict[str, Any]:
    """Name what was measured."""
    mfu = model_flops_utilisation(
        case.shape,
        case.mix,
        tokens=case.tokens,
        step_s=timing.median_ms / 1e3,
        devices=1,
        peak_flops_per_s=place.hardware.peak_flops_per_s,
    )
    rate = {f"{name}_tokens_per_s": round(case.tokens / timing.median_ms * 1e3, 1), f"{name}_mfu": round(mfu, 4)}
    return rate | timing.figures(name)


def ours(figures: dict[str, Any], some: list[Case], place: Place) -> dict[str, Any]:
    """Time our step in cases of one shape; figures get each at once, so that a later case that fails costs none."""
    with trainer(some[0].shape, place) as training:
        for routing in ROUTINGS:
            if routing == "balanced":
                balance(training.model)
            for case in some:
                inputs = made_up(case.shape, case.mix, place, packs=case.packs)
                timing = measure(functools.partial(training.step, inputs), place)
                figures |= figures_of(case, f"{case.name}_{routing}_ours", timing, place)
                figures[f"{case.name}_{routing}_fullest_expert_ratio"] = round(training.fullest, 3)
                say_figures(figures)
    return figures


def peers(figures: dict[str, Any], case: Case, place: Place) -> None:
    """Time each peer, on the same tokens."""
    generator = torch.Generator().manual_seed(0)
    size = (case.packs, case.mix.sequence_tokens + 1)
    tokens_BS = torch.randint(2, case.shape.decoder.vocabulary, size, generator=generator).to(place.device)
    steps: dict[str, Callable[[bool], Any]] = {
        "transformers": lambda even: transformers_step(case.shape, place, tokens_BS, balanced=even, compiled=False),
        "transformers_compiled": lambda even: transformers_step(
            case.shape, place, tokens_BS, balanced=even, compiled=True
        ),
        "torchtitan": lambda even: torchtitan_step(case.shape, place, tokens_BS, balanced=even),
    }
    for routing in ROUTINGS:
        for system, make in steps.items():
            name = f"{case.name}_{routing}_{system}"

            def run(name: str = name, make: Callable[[bool], Any] = make, even: bool = routing == "balanced") -> Any:
                return figures_of(case, name, measure(make(even), place), place)

            attempt_peer(figures, name, place, run)
            torch.compiler.reset()


if __name__ == "__main__":
    raise SystemExit(run_alone("g1", bench, __doc__))
