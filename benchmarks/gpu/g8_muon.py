"""G8: a step of Muon over stacked experts, beside torch's over the same matrices one by one: time and memory."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.gpu.harness import Place, attempt, attempt_peer, judged, measure, release, run_alone
from benchmarks.gpu.ours import RATE, Trainer, made_up, trainer
from benchmarks.gpu.shapes import base, cut
from torch import nn

from polyreme_planner.flops import Mix
from polyreme_planner.hardware import GIB
from polyreme_trainer.train import muon
from polyreme_trainer.train.settings import OptimizerName, OptimizerSettings

BAR = {"ours_over_torch_ratio": 1.0}
WORDS = 8192
"""Embedding and head are AdamW's in both: small ones, so that Muon is what is timed."""


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Step both on made-up gradients."""
    shape = cut(base(place), base(place).decoder.dense_layers + 1, sees=False, vocabulary=WORDS)
    figures: dict[str, Any] = {}
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def ours() -> dict[str, Any]:
        settings = OptimizerSettings(name=OptimizerName.MUON)
        with trainer(shape, place, optimizer=settings) as training:
            training.step(made_up(shape, Mix(sequence_tokens=64, visual_share=0), place, packs=1))
            shapes.extend((name, tuple(parameter.shape)) for name, parameter in training.model.named_parameters())
            timing = measure(lambda: training.state.optimizer.step(learning_rate=RATE, gradient_scale=1.0), place)
            return {"ours_state_gib": round(state_bytes(training) / GIB, 3)} | timing.figures("ours")

    attempt(figures, "ours", ours)
    flops, moved = matrices_work(shapes)
    figures["matrices"] = sum(len(list(matrices(name, of))) for name, of in shapes)
    figures["floor_ms"] = round(place.floor_ms(flops, moved), 4)
    attempt_peer(figures, "torch", place, lambda: torchs(shapes, place))
    if "ours_ms" in figures and "torch_ms" in figures:
        figures["ours_over_torch_ratio"] = round(figures["torch_ms"] / figures["ours_ms"], 3)
    bar = {} if place.ours_only else BAR
    return figures, bar, judged(figures, bar, place) and "ours_ms" in figures


def state_bytes(training: Trainer) -> int:
    """Bytes of what the optimizer holds, originals included."""
    moments = sum(buffer.nbytes for own in training.state.optimizer.states for _, buffer, _ in own.buffers())
    return moments + sum(part.masters.nbytes for part in training.state.flat.parts if part.masters is not None)


def matrices(name: str, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows and columns of each matrix that Muon turns."""
    if name not in muon.whole_names([(name, shape)]):
        return []
    count, rows, columns = muon.matrices_of(name, torch.empty(shape, device="meta")).shape
    return [(rows, columns)] * count


def matrices_work(shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[float, float]:
    """Operations of five iterations on all matrices, and bytes that their state takes at least.

    An iteration makes the smaller square of a matrix, the square of that, and its product with the matrix.
    """
    flops = moved = 0.0
    for name, shape in shapes:
        for rows, columns in matrices(name, shape):
            small, large = min(rows, columns), max(rows, columns)
            flops += muon.ITERATIONS * (4 * small * small * large + 2 * small**3)
            # Gradient read, momentum and original read and written, weight written.
            moved += rows * columns * (4 + 8 + 8 + 2)
    return flops, moved


def torchs(shapes: list[tuple[str, tuple[int, ...]]], place: Place) -> dict[str, Any]:
    """``torch.optim.Muon`` on float32 matrices, which takes no stacks; vectors and tables go to its fused AdamW."""
    single: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []

    def parameter(*size: int) -> nn.Parameter:
        made = nn.Parameter(torch.randn(size, device=place.device) * 0.02)
        made.grad = torch.randn(size, device=place.device) * 0.02
        return made

    for name, shape in shapes:
        found = matrices(name, shape)
        single += [parameter(*size) for size in found]
        rest += [] if found else [parameter(*shape)]
    optimizers = [
        torch.optim.Muon(single, lr=RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=RATE, fused=True),
    ]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    timing = measure(step, place)
    held = sum(
        value.nbytes
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    held += sum(of.nbytes for of in (*single, *rest))
    release()
    return {"torch_state_gib": round(held / GIB, 3)} | timing.figures("torch")


if __name__ == "__main__":
    raise SystemExit(run_alone("g8", bench, __doc__))
