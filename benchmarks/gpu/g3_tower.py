"""G3: the vision tower and projector on packed images of mixed sizes, forward and backward: images a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.gpu.harness import Place, attempt, attempt_peer, judged, measure, need_device, run_alone
from benchmarks.gpu.peers import built, torchtitan_config
from benchmarks.gpu.shapes import base, cut
from torch import Tensor, nn

from polyreme_planner.flops import Mix, forward_flops
from polyreme_planner.model_parts import Part, part_parameters
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.projector import Projector
from polyreme_trainer.model.vision import VisionTower

BAR = {"ours_over_transformers_ratio": 1.0}
SIDES = [(16, 16), (32, 32), (64, 64), (24, 40), (48, 32), (20, 20), (64, 40), (32, 16)] * 2
"""Rows and columns of each image [patches]: 256 to 4,096 patches."""


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Run ours and each peer on the same images."""
    shape = cut(base(place), base(place).decoder.dense_layers + 1)
    grids = [(rows // 8 * 2, columns // 8 * 2) for rows, columns in SIDES[:4]] if place.rehearsal else SIDES
    values = shape.vision.channels * shape.vision.patch_px**2
    patches_PC = torch.randn(sum(rows * columns for rows, columns in grids), values, device=place.device)
    flops = sum(image_flops(shape, rows * columns) for rows, columns in grids)
    weights = 3 * 2 * part_parameters(shape)[Part.TOWER].total
    figures: dict[str, Any] = {
        "images": len(grids),
        "patches": patches_PC.shape[0],
        "floor_ms": round(place.floor_ms(flops, weights), 4),
    }
    runs: dict[str, Callable[[], Callable[[], None]]] = {
        "ours": lambda: ours(shape, place, patches_PC, grids),
        "transformers": lambda: transformers_tower(shape, place, patches_PC, grids),
        "torchtitan": lambda: torchtitan_tower(shape, place, patches_PC, grids),
    }
    for system, make in runs.items():

        def run(system: str = system, make: Callable[[], Callable[[], None]] = make) -> dict[str, Any]:
            timing = measure(make(), place)
            rates = {
                f"{system}_images_per_s": round(len(grids) / timing.median_ms * 1e3, 2),
                f"{system}_tflops": round(flops / timing.median_ms / 1e9, 2),
            }
            return rates | timing.figures(system)

        if system == "ours":
            attempt(figures, system, run)
        else:
            attempt_peer(figures, system, place, run)
    if "ours_ms" in figures and "transformers_ms" in figures:
        figures["ours_over_transformers_ratio"] = round(figures["transformers_ms"] / figures["ours_ms"], 3)
    bar = {} if place.ours_only else BAR
    return figures, bar, judged(figures, bar, place) and "ours_ms" in figures


def image_flops(shape: ModelShape, patches: int) -> float:
    """Operations of one image in training, by the closed formula."""
    tokens = patches / shape.vision.merge**2
    mix = Mix(sequence_tokens=1, image_patches=patches, visual_share=1)
    return 3 * forward_flops(shape, mix)[Part.TOWER] * tokens


def passes(run: Callable[[], Tensor], module: nn.Module) -> Callable[[], None]:
    """Forward and backward, gradients of weights recomputed each time."""
    wanted = list(module.parameters())

    def step() -> None:
        out = run()
        torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return step


def ours(shape: ModelShape, place: Place, patches_PC: Tensor, grids: list[tuple[int, int]]) -> Callable[[], None]:
    """Our tower and projector."""
    with torch.device(place.device):
        whole = nn.ModuleList([VisionTower(shape.vision), Projector(shape)])
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.02)
    whole = whole.to(place.dtype)
    tower, projector = whole
    return passes(lambda: projector(tower(patches_PC, grids)), whole)


def transformers_tower(
    shape: ModelShape, place: Place, patches_PC: Tensor, grids: list[tuple[int, int]]
) -> Callable[[], None]:
    """Its tower of Kimi K2.5, which is ours where an image is one frame; its projector is left out."""
    from transformers.models.kimi_k25 import Kimi_K25VisionConfig
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

    vision = shape.vision
    config = Kimi_K25VisionConfig(
        patch_size=vision.patch_px,
        pos_emb_height=vision.position_rows,
        pos_emb_width=vision.position_rows,
        num_attention_heads=vision.heads,
        num_hidden_layers=vision.layers,
        hidden_size=vision.width,
        intermediate_size=vision.ffn_width,
        merge_kernel_size=(vision.merge, vision.merge),
        rope_parameters={"rope_type": "axial", "rope_theta": vision.rope_theta},
    )
    config._attn_implementation = "sdpa"  # noqa: SLF001 - a tower alone has no public way
    with torch.device(place.device):
        tower: Any = Kimi_K25VisionModel(config)
        tower = tower.to(place.dtype).train()
    pixels = patches_PC.to(place.dtype).view(-1, vision.channels, vision.patch_px, vision.patch_px)
    times = torch.tensor([[1, rows, columns] for rows, columns in grids], device=place.device)
    return passes(lambda: tower(pixels, grid_thw=times).pooler_output, tower)


def torchtitan_tower(
    shape: ModelShape, place: Place, patches_PC: Tensor, grids: list[tuple[int, int]]
) -> Callable[[], None]:
    """Its tower and projector, on a batch that is padded to the largest image; blocks compiled."""
    need_device(place, "torchtitan's attention has no backward on processors")
    encoder = built(torchtitan_config(shape).vision_encoder, place)
    for block in encoder.layers.values():
        block.compile()
    longest = max(rows * columns for rows, columns in grids)
    padded = torch.zeros(len(grids), longest, patches_PC.shape[1], device=place.device, dtype=place.dtype)
    begin = 0
    for number, (rows, columns) in enumerate(grids):
        padded[number, : rows * columns] = patches_PC[begin : begin + rows * columns]
        begin += rows * columns
    times = torch.tensor([[1, rows, columns] for rows, columns in grids], device=place.device)
    return passes(lambda: encoder(padded, grid_thw=times), encoder)


if __name__ == "__main__":
    raise SystemExit(run_alone("g3", bench, __doc__))
