"""The loss is a sum over unmasked targets, however it is cut."""

from __future__ import annotations

import pytest
import torch

from polyreme_api.batch import IGNORED_TARGET
from polyreme_trainer.model import loss
from polyreme_trainer.model.loss import token_loss


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(30, 8, generator=generator).requires_grad_()
    head_VD = torch.randn(50, 8, generator=generator).requires_grad_()
    targets_T = torch.randint(0, 50, (30,), generator=generator)
    targets_T[::3] = IGNORED_TARGET
    return hidden_TD, head_VD, targets_T


@pytest.mark.parametrize("logits_max", [1 << 28, 7 * 50, 1])
def test_the_sum_and_its_gradients_equal_the_plain_cross_entropy(
    logits_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "LOGITS_MAX", logits_max)
    hidden_TD, head_VD, targets_T = inputs()
    total, count = token_loss(hidden_TD, head_VD, targets_T)
    expected = torch.nn.functional.cross_entropy(
        hidden_TD @ head_VD.T, targets_T, ignore_index=IGNORED_TARGET, reduction="sum"
    )
    assert int(count) == 20
    torch.testing.assert_close(total, expected)
    ours = torch.autograd.grad(total, (hidden_TD, head_VD))
    theirs = torch.autograd.grad(expected, (hidden_TD, head_VD))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_fully_masked_stream_costs_nothing_and_still_has_gradients() -> None:
    hidden_TD, head_VD, targets_T = inputs()
    total, count = token_loss(hidden_TD, head_VD, torch.full_like(targets_T, IGNORED_TARGET))
    total.backward()
    assert total.item() == 0.0
    assert int(count) == 0
    assert hidden_TD.grad is not None
    assert hidden_TD.grad.abs().max() == 0
