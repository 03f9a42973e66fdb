"""G4: output head and loss, forward and backward, 16K tokens and 163,840 words: time, and memory beyond the inputs.

All start from the same hidden states and head, and end with both gradients; a mean loss that differs is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader knows
from benchmarks.gpu.harness import (
    Place,
    SkippedError,
    attempt,
    attempt_peer,
    judged,
    measure,
    need_device,
    product_bytes,
    run_alone,
    scalar_difference,
)
from benchmarks.gpu.peers import torch_head_loss
from benchmarks.gpu.shapes import KI, base
from torch import Tensor, nn

from polyreme_planner.hardware import GIB
from polyreme_trainer.model.loss import token_loss

BAR = {"ours_over_torch_chunked_ratio": 1.0}
LOSS_TOLERANCE = 5e-3
CHUNKS = 8
"""What torchtitan cuts a sequence into."""

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Run every head."""
    decoder = base(place).decoder
    tokens, width, words = (64 if place.rehearsal else 16 * KI), decoder.width, decoder.vocabulary
    flops, moved = 3 * 2 * tokens * width * words, product_bytes(tokens, width, words)
    # Logits need never leave the chip: that leaves operands and results.
    least = moved - 3 * 2 * tokens * words
    figures: dict[str, Any] = {"tokens": tokens, "floor_ms": round(place.floor_ms(flops, least), 4)}
    hidden_TD, head_VD, targets_T = operands(tokens, width, words, place)
    heads: dict[str, Callable[[], Loss]] = {
        "ours": lambda: ours,
        "torch_chunked": lambda: torch_head_loss,
        "torch_plain": lambda: plain,
        "liger": lambda: liger(place),
        "cut_cross_entropy": lambda: cut_cross_entropy(place),
        "torchtitan_chunked": lambda: torchtitan_chunked(place, width, words),
    }
    expected = float(plain(hidden_TD, head_VD, targets_T).detach()) if place.rehearsal else None
    for name, make in heads.items():

        def run(name: str = name, make: Callable[[], Loss] = make, expected: float | None = expected) -> dict[str, Any]:
            return timed(name, make(), (hidden_TD, head_VD, targets_T), expected, place)

        if name == "ours":
            found = attempt(figures, name, run)
            expected = None if found is None else found["ours_loss"]
        else:
            attempt_peer(figures, name, place, run)
    if "ours_ms" in figures and "torch_chunked_ms" in figures:
        figures["ours_over_torch_chunked_ratio"] = round(figures["torch_chunked_ms"] / figures["ours_ms"], 3)
    bar = {} if place.ours_only else BAR
    return figures, bar, judged(figures, bar, place) and "ours_ms" in figures


def operands(tokens: int, width: int, words: int, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of the size that a norm leaves, a head as it is drawn."""
    generator = torch.Generator(place.device).manual_seed(0)
    there: dict[str, Any] = {"device": place.device, "generator": generator}
    hidden_TD = torch.randn(tokens, width, **there).to(place.dtype).requires_grad_()
    head_VD = (torch.randn(words, width, **there) * 0.02).to(place.dtype).requires_grad_()
    return hidden_TD, head_VD, torch.randint(words, (tokens,), **there)


def timed(
    name: str, loss: Loss, given: tuple[Tensor, Tensor, Tensor], expected: float | None, place: Place
) -> dict[str, Any]:
    """Time a head.

    Raises:
        SkippedError: If its loss is another one.
    """
    hidden_TD, head_VD, _ = given
    found = float(loss(*given).detach())
    if expected is not None and scalar_difference(found, expected) > LOSS_TOLERANCE:
        raise SkippedError(f"its loss is {found:.4f}, ours {expected:.4f}: not the same work")

    def step() -> None:
        loss(*given).backward()
        hidden_TD.grad = head_VD.grad = None

    held = 0 if place.rehearsal else torch.cuda.memory_allocated()
    timing = measure(step, place)
    beyond = max(0.0, timing.peak_gib - held / GIB)
    return {f"{name}_loss": round(found, 5), f"{name}_extra_gib": round(beyond, 3)} | timing.figures(name)


def ours(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Our head."""
    total, count = token_loss(hidden_TD, head_VD, targets_T)
    return total / count


def plain(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    """All logits at once."""
    return F.cross_entropy(F.linear(hidden_TD, head_VD).float(), targets_T)


def liger(place: Place) -> Loss:
    """Liger's fused head."""
    need_device(place, "Liger's kernels are Triton")
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Loss = liger_fused_linear_cross_entropy
    return loss


def cut_cross_entropy(place: Place) -> Loss:
    """Apple's, which leaves out what is too small for the type: its gradient is an approximation by design."""
    need_device(place, "its kernels are Triton")
    from cut_cross_entropy import linear_cross_entropy

    loss: Loss = linear_cross_entropy
    return loss


def torchtitan_chunked(place: Place, width: int, words: int) -> Loss:
    """Chunks of torchtitan around a plain head; its backward runs chunk by chunk inside of the forward."""
    from torchtitan.components.loss import ChunkedLossWrapper

    head = nn.Linear(width, words, bias=False, device="meta", dtype=place.dtype)
    chunked = ChunkedLossWrapper.Config(num_chunks=CHUNKS).build()
    chunked.set_lm_head(head)

    def loss(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
        head._parameters["weight"] = head_VD  # type: ignore[assignment]  # noqa: SLF001 - the operand is a leaf of ours, not a module's
        total: Tensor = chunked(hidden_TD.unsqueeze(0), targets_T.unsqueeze(0))[0]
        return total / targets_T.numel()

    return loss


if __name__ == "__main__":
    raise SystemExit(run_alone("g4", bench, __doc__))
