"""Recomputed tensors are the same, bit for bit, and less is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from polyreme_planner.costs import Recompute
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.recompute import recomputable, recomputable_block, run_layer
from tests.unit.trainer.kept import kept_bytes

if TYPE_CHECKING:
    from tests.unit.trainer.model.conftest import Batch

STREAMS = {
    "dense": [14, 9, 21, 6],
    "rows": [60, 60, 60, 60],
    "padded rows": [90, 60, 70, 60],
    "padded": [140, 120, 110, 90],
    "loop": [260, 20, 21, 6],
}
"""Lengths of documents for which each kernel of attention is chosen on CPU."""


def step(options: ComputeOptions, batch: Batch) -> tuple[Tensor, dict[str, Tensor], int]:
    model = build_model(KIMI_VL_NANO, seed=3, media_token=1, options=options)
    sums: list[Tensor] = []

    def forward() -> None:
        decoded = model(batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
        sums.append(token_loss(decoded.hidden_TD, model.language_model.lm_head.weight, batch.targets_T)[0])

    held = kept_bytes(forward, without=model.parameters())
    sums[0].backward()
    return sums[0].detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, held


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("kernel", STREAMS)
def test_losses_and_gradients_are_the_same_bits_and_less_is_held(
    kernel: str, capacity: float | None, batch_of: Callable[..., Batch]
) -> None:
    batch = batch_of(STREAMS[kernel], [[(2, 4)], [], [(4, 4), (2, 6)], [(2, 2)]])
    loss, gradients, most = step(ComputeOptions(capacity_factor=capacity), batch)
    for recompute, share in ((Recompute.SELECTIVE, 0.85), (Recompute.FULL, 0.5)):
        again, others, held = step(ComputeOptions(recompute=recompute, capacity_factor=capacity), batch)
        assert torch.equal(again, loss)
        assert others.keys() == gradients.keys()
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
        assert held < share * most, recompute
        most = held


def run(make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return run_layer(Recompute.SELECTIVE, lambda: make(*inputs))


def test_a_tensor_is_recomputed_once_per_backward() -> None:
    calls: list[int] = []
    x, first, second = (torch.randn(5, 5, requires_grad=True) for _ in range(3))

    def double(given: Tensor) -> Tensor:
        calls.append(1)
        return given * 2

    def layer(given: Tensor) -> Tensor:
        made = recomputable(double, given)
        return (made @ first + made.T @ second).sum()

    out, expected = run(layer, x), torch.autograd.grad(layer(x), (x, first, second))
    for _ in range(2):
        calls.clear()
        for ours, theirs in zip(torch.autograd.grad(out, (x, first, second), retain_graph=True), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert len(calls) == 1


def test_a_tensor_that_can_be_recomputed_is_freed_when_its_layer_has_run() -> None:
    """Its memory, and not only what autograd was given to save: the graph also keeps the hooks."""
    made: list[StorageWeakRef] = []

    def double(given: Tensor) -> Tensor:
        doubled = given * 2
        made.append(StorageWeakRef(doubled.untyped_storage()))
        return doubled

    x, weight = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    out = run(lambda given: recomputable(double, given) @ weight, x)
    assert made[0].expired()
    out.sum().backward()
    assert len(made) == 2


def test_tensors_recomputed_from_recomputed_tensors_are_right_too() -> None:
    x, weight = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def layer(given: Tensor) -> Tensor:
        inner = recomputable_block(lambda a: torch.tanh(a) * 3, given)
        outer = recomputable(lambda a: torch.cat((a, a)), inner)
        return (outer[2:6] @ weight).square().sum()

    assert kept_bytes(lambda: run(layer, x)) < kept_bytes(lambda: layer(x))
    for ours, theirs in zip(
        torch.autograd.grad(run(layer, x), (x, weight)), torch.autograd.grad(layer(x), (x, weight)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_recipe_that_makes_something_else_is_seen(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of bits would notice: keys that are recomputed without their rotation."""
    from polyreme_trainer.model import attention

    _, right, _ = step(ComputeOptions(), batch)
    real = attention._keys

    def forgetful(k_THN: Tensor, k_TR: Tensor, turn_TF: Tensor) -> Tensor:
        return real(k_THN, k_TR, turn_TF if torch.is_grad_enabled() else torch.ones_like(turn_TF))

    monkeypatch.setattr(attention, "_keys", forgetful)
    _, wrong, _ = step(ComputeOptions(recompute=Recompute.SELECTIVE), batch)
    assert any(not torch.equal(wrong[name], gradient) for name, gradient in right.items())
