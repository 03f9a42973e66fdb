"""Routing, grouped products and the head on the device equal a CPU's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from polyreme_planner.costs import Recompute
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.empty_groups import leaves_empty_groups_zero
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.moe import Experts, MixtureOfExperts
from polyreme_trainer.model.recompute import run_layer
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.world import World
from tests.device.conftest import HALF_BOUND, SINGLE_BOUND, relative

pytestmark = pytest.mark.device

SHAPE = dataclasses.replace(
    KIMI_VL_NANO.decoder, width=256, expert_ffn_width=88, experts=16, experts_per_token=4, shared_experts=2
)
"""A width of experts that is a multiple of 8 and of nothing more: what a product of 16 bytes a row allows at least."""
COUNTS = {
    "even": [8] * 16,
    "uneven": [0, 1, 40, 0, 0, 13, 2, 2, 0, 64, 1, 0, 0, 0, 5, 0],
    "one": [0] * 15 + [77],
    "none": [0] * 16,
}


def layer_of(
    device: torch.device, dtype: torch.dtype, *, options: ComputeOptions = DEFAULT_OPTIONS
) -> MixtureOfExperts:
    """A layer whose weights are numbers that bfloat16 has; the router stays float32."""
    generator = torch.Generator().manual_seed(1)
    layer = MixtureOfExperts(SHAPE, options=options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16().float())
    layer = layer.to(device)
    for name, parameter in layer.named_parameters():
        if "gate.weight" not in name:
            parameter.data = parameter.data.to(dtype)
    return layer.train()


def test_experts_without_rows_get_no_gradient(device: torch.device) -> None:
    """On a device that fills them (pytorch#172439), by clearing them, as a rank of it does."""
    clear_empty = not leaves_empty_groups_zero(device, torch.bfloat16)
    experts = layer_of(device, torch.bfloat16, options=ComputeOptions(clear_empty=clear_empty)).experts
    counts = COUNTS["uneven"]
    out_SD = experts(rows_of(sum(counts)).to(device, torch.bfloat16), torch.tensor(counts, device=device))
    for gradient in torch.autograd.grad(out_SD, tuple(experts.parameters()), torch.ones_like(out_SD)):
        assert not any(bool(gradient[expert].ne(0).any()) for expert, count in enumerate(counts) if not count)


def rows_of(count: int) -> Tensor:
    return torch.randn(count, SHAPE.width, generator=torch.Generator().manual_seed(2)).bfloat16().float()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, HALF_BOUND), (torch.float32, SINGLE_BOUND)])
def test_grouped_products_are_those_of_a_processor(
    device: torch.device, dtype: torch.dtype, bound: float, counts: list[int]
) -> None:
    results: list[list[Tensor]] = []
    for where, kind in ((device, dtype), (torch.device("cpu"), torch.float32)):
        experts: Experts = layer_of(where, kind).experts
        rows_SD = rows_of(sum(counts)).to(where, kind).requires_grad_()
        out_SD = experts(rows_SD, torch.tensor(counts, device=where))
        grad_SD = rows_of(sum(counts)).flip(1).to(where, kind)
        results.append([out_SD, *torch.autograd.grad(out_SD, (rows_SD, *experts.parameters()), grad_SD)])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert bool(found.isfinite().all())
        if expected.numel() and expected.abs().max() > 0:
            assert relative(found, expected) < bound


def test_the_same_experts_are_chosen_in_the_same_order(device: torch.device) -> None:
    x_TD = rows_of(500)
    chosen: list[tuple[Tensor, Tensor, Tensor]] = []
    for where in (device, torch.device("cpu")):
        gate = layer_of(where, torch.float32).gate
        weights_TK, experts_TK, _ = gate(x_TD.to(where))
        order_TK = experts_TK.argsort(1)
        weights_TK = weights_TK.gather(1, order_TK)
        chosen.append((weights_TK.cpu(), experts_TK.gather(1, order_TK).cpu(), experts_TK))
    assert torch.equal(chosen[0][1], chosen[1][1])
    assert relative(chosen[0][0], chosen[1][0]) < SINGLE_BOUND


@pytest.mark.parametrize("factor", [None, 1.0], ids=["dropless", "capacity"])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_a_layer_of_experts_is_that_of_a_processor(
    device: torch.device, factor: float | None, recompute: Recompute
) -> None:
    results: list[list[Tensor]] = []
    for where in (device, torch.device("cpu")):
        layer = layer_of(where, torch.float32, options=ComputeOptions(capacity_factor=factor))
        x_TD = rows_of(300).to(where).requires_grad_()
        out_TD, routed = run_layer(recompute, layer, x_TD)
        grads = torch.autograd.grad(out_TD, (x_TD, *layer.parameters()), rows_of(300).flip(0).to(where))
        results.append([out_TD, *grads, routed.load_E, routed.dropped_E, routed.entropy])
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < SINGLE_BOUND


@pytest.mark.parametrize("factor", [None, 1.25], ids=["uneven", "even"])
def test_a_group_of_one_rank_exchanges_rows_with_itself(
    device: torch.device, world: World, factor: float | None
) -> None:
    """The one rank's way over NCCL is the same layer."""
    alone = layer_of(device, torch.float32, options=ComputeOptions(capacity_factor=factor))
    exchanged = layer_of(device, torch.float32, options=ComputeOptions(capacity_factor=factor))
    exchanged.dispatcher = AllToAllDispatcher(world.meshes.world_group)
    results = []
    for layer in (alone, exchanged):
        x_TD = rows_of(300).to(device).requires_grad_()
        out_TD, _ = layer(x_TD)
        results.append([out_TD, *torch.autograd.grad(out_TD, (x_TD, *layer.parameters()), torch.ones_like(out_TD))])
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < SINGLE_BOUND


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, HALF_BOUND), (torch.float32, SINGLE_BOUND)])
def test_head_and_loss_are_those_of_a_processor(
    device: torch.device, dtype: torch.dtype, bound: float, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, words = 96, 640
    monkeypatch.setattr("polyreme_trainer.model.loss.LOGITS_MAX", tokens * words // chunks)
    hidden_TD = torch.randn(tokens, 256, generator=generator).bfloat16().float()
    head_VD = (torch.randn(words, 256, generator=generator) * 0.1).bfloat16().float()
    targets_T = torch.randint(words, (tokens,), generator=generator)
    targets_T[::7] = -100
    results = []
    for where, kind in ((device, dtype), (torch.device("cpu"), torch.float32)):
        hidden, head = (tensor.to(where, kind).requires_grad_() for tensor in (hidden_TD, head_VD))
        total, count = token_loss(hidden, head, targets_T.to(where))
        total.backward()
        assert int(count) == int((targets_T != -100).sum())
        assert total.dtype == torch.float32
        results.append([total, hidden.grad, head.grad])
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < bound
