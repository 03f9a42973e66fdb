"""Experts without rows get no gradient, also on a device whose product leaves values there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.empty_groups import leaves_empty_groups_zero
from polyreme_trainer.model.moe import MixtureOfExperts

COUNTS = (5, 0, 7, 0, 0, 1, 0, 3)


def gradients(*, clear_empty: bool) -> list[Tensor]:
    torch.manual_seed(0)
    experts = MixtureOfExperts(KIMI_VL_NANO.decoder, options=ComputeOptions(clear_empty=clear_empty)).experts
    for weights in experts.parameters():
        torch.nn.init.normal_(weights)
    answers = experts(torch.randn(sum(COUNTS), KIMI_VL_NANO.decoder.width), torch.tensor(COUNTS))
    return list(torch.autograd.grad(answers.square().sum(), list(experts.parameters())))


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the product leave what it found in the gradients of empty groups."""
    product = functional.grouped_mm

    def leaves_values(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
        empty_L11 = (offs.diff(prepend=offs.new_zeros(1)) == 0).view(-1, 1, 1)
        if weights.requires_grad:
            weights = weights.view_as(weights)
            weights.register_hook(lambda gradient: gradient.masked_fill(empty_L11, torch.nan))
        return product(rows, weights, offs=offs)

    monkeypatch.setattr(functional, "grouped_mm", leaves_values)


def test_a_processor_leaves_them_zero() -> None:
    assert leaves_empty_groups_zero("cpu", torch.float32)
    assert all(
        torch.equal(*both) for both in zip(gradients(clear_empty=False), gradients(clear_empty=True), strict=True)
    )


@pytest.mark.usefixtures("filled")
def test_a_device_that_fills_them_is_known_and_its_values_are_cleared() -> None:
    assert not leaves_empty_groups_zero("cpu", torch.float32)
    for filled, cleared in zip(gradients(clear_empty=False), gradients(clear_empty=True), strict=True):
        assert filled[1].isnan().all()
        assert cleared.isfinite().all()
        assert [bool(of.any()) for of in cleared] == [count > 0 for count in COUNTS]
