"""G2: one mixture-of-experts layer alone, forward and backward, at 4K, 16K and 64K tokens: TFLOP/s.

scattermoe and megablocks are not compared: neither has a release for this torch in a registry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.harness import (
    Place,
    Timing,
    attempt,
    attempt_peer,
    judged,
    measure,
    need_device,
    product_bytes,
    run_alone,
)
from benchmarks.gpu.ours import balance
from benchmarks.gpu.peers import built, round_robin, torchtitan_config
from benchmarks.gpu.shapes import KI, base, cut
from torch import Tensor, nn

from polyreme_planner.shapes import DecoderShape, ModelShape
from polyreme_trainer.export.config import text_config
from polyreme_trainer.model.moe import MixtureOfExperts

SIZES = (4, 16, 64)
"""Thousands of tokens."""
ROUTINGS = ("natural", "balanced")
BAR = {"16k_balanced_ours_over_grouped_transformers_ratio": 1.0}


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Run all sizes and routings."""
    shape = cut(base(place), base(place).decoder.dense_layers + 1)
    decoder = shape.decoder
    figures: dict[str, Any] = {
        "transformers_batched_skipped": "it gathers the weights of every row: 35 GB at 1K tokens"
    }
    figures["scattermoe_skipped"] = figures["megablocks_skipped"] = "no release for this torch in a registry"
    systems: dict[str, Callable[[bool], nn.Module]] = {
        "ours": lambda even: ours(decoder, place, balanced=even),
        "transformers_grouped": lambda even: transformers_layer(decoder, place, "grouped_mm", balanced=even),
        "transformers_eager": lambda even: transformers_layer(decoder, place, "eager", balanced=even),
        "torchtitan": lambda even: torchtitan_layer(shape, place, balanced=even),
    }
    for tokens in SIZES:
        rows = tokens * (16 if place.rehearsal else KI)
        flops, moved = training_work(decoder, rows)
        figures[f"{tokens}k_floor_ms"] = round(place.floor_ms(flops, moved), 4)
        for routing in ROUTINGS:
            for system, make in systems.items():
                name = f"{tokens}k_{routing}_{system}"

                def run(
                    name: str = name,
                    make: Callable[[bool], nn.Module] = make,
                    rows: int = rows,
                    even: bool = routing == "balanced",
                ) -> dict[str, Any]:
                    timing = block_timing(make(even), rows, decoder.width, place)
                    rate = training_work(decoder, rows)[0] / timing.median_ms / 1e9
                    return {f"{name}_tflops": round(rate, 2)} | timing.figures(name)

                if system == "ours":
                    attempt(figures, name, run)
                else:
                    attempt_peer(figures, name, place, run)
            case = f"{tokens}k_{routing}"
            own, other = (figures.get(f"{case}_{system}_ms") for system in ("ours", "transformers_grouped"))
            if own and other:
                figures[f"{case}_ours_over_grouped_transformers_ratio"] = round(other / own, 3)
    bar = {} if place.ours_only else BAR
    ran = all(f"{tokens}k_{routing}_ours_ms" in figures for tokens in SIZES for routing in ROUTINGS)
    return figures, bar, ran and judged(figures, bar, place)


def training_work(decoder: DecoderShape, tokens: int) -> tuple[float, float]:
    """Operations and bytes of forward and backward: router, routed and shared experts."""
    d, f = decoder.width, decoder.expert_ffn_width
    active = decoder.experts_per_token + decoder.shared_experts
    flops = 3 * tokens * 2 * (3 * d * f * active + d * decoder.experts)
    routed, shared = tokens * decoder.experts_per_token, decoder.shared_experts * f
    moved = (
        product_bytes(routed, d, 2 * f, decoder.experts)
        + product_bytes(routed, f, d, decoder.experts)
        + product_bytes(tokens, d, 2 * shared)
        + product_bytes(tokens, shared, d)
    )
    return flops, moved


def block_timing(layer: nn.Module, tokens: int, width: int, place: Place) -> Timing:
    """Time forward and backward; gradients of weights are recomputed each time."""
    x_TD = torch.randn(tokens, width, device=place.device, dtype=place.dtype, requires_grad=True)
    grad_TD = torch.randn(tokens, width, device=place.device, dtype=place.dtype)
    wanted = [x_TD, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]

    def step() -> None:
        torch.autograd.grad(layer(x_TD), wanted, grad_TD)

    return measure(step, place)


class _First(nn.Module):
    """A layer whose first result is the one that is looked at."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return it."""
        out_TD: Tensor = self.layer(x_TD)[0]
        return out_TD


class _Batched(nn.Module):
    """A layer that takes a batch of one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor) -> Tensor:
        """Add and drop the batch."""
        out_BTD: Tensor = self.layer(x_TD.unsqueeze(0))
        return out_BTD.squeeze(0)


def drawn(layer: nn.Module, place: Place, *, exact: str) -> nn.Module:
    """Draw the weights, alike for all; the router stays float32."""
    layer = layer.to(place.device)
    generator = torch.Generator(place.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(std=0.02, generator=generator)
            if exact not in name:
                parameter.data = parameter.data.to(place.dtype)
    return layer.train()


def ours(decoder: DecoderShape, place: Place, *, balanced: bool) -> nn.Module:
    """Our layer."""
    with torch.device(place.device):
        layer = drawn(MixtureOfExperts(decoder), place, exact="gate.weight")
    if balanced:
        balance(layer)
    return _First(layer)


def transformers_layer(decoder: DecoderShape, place: Place, options: str, *, balanced: bool) -> nn.Module:
    """Its layer, with the products that are asked for."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(**text_config(decoder))
    config._experts_implementation = options  # noqa: SLF001 - a layer alone has no public way
    with torch.device(place.device):
        layer = drawn(DeepseekV3MoE(config), place, exact="gate.weight")
    if balanced:
        gate: Any = layer.gate
        gate.forward = round_robin(gate.forward, gate.num_experts)
    return _Batched(layer)


def torchtitan_layer(shape: ModelShape, place: Place, *, balanced: bool) -> nn.Module:
    """Its layer, compiled."""
    need_device(place, "torchtitan's grouped products are bfloat16, and compiled")
    config = torchtitan_config(shape).layers[-1].moe
    layer = built(config, place)
    if balanced:
        layer.router._debug_force_load_balance = True  # noqa: SLF001 - it has no public name
    layer.compile()
    return _Batched(layer)


if __name__ == "__main__":
    raise SystemExit(run_alone("g2", bench, __doc__))
