"""The loss is a sum over unmasked targets, however it is cut."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme_api.batch import IGNORED_TARGET
from polyreme_trainer.model import loss
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.tensor import Alone


class Thread(Alone):
    """One of the ranks that share the words, each in a thread: sums and maxima alone."""

    def __init__(self, place: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.place, self.parts = place, len(given)
        self._given, self._barrier = given, barrier

    def total(self, x: Tensor) -> Tensor:
        """Sum over ranks."""
        return self._all(x).sum(0)

    def largest(self, x: Tensor) -> Tensor:
        """Largest over ranks."""
        return self._all(x).amax(0)

    def _all(self, x: Tensor) -> Tensor:
        self._given[self.place] = x
        self._barrier.wait()
        every = torch.stack([each for each in self._given if each is not None])
        self._barrier.wait()
        return every


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


def test_logits_of_all_tokens_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 unmasked tokens over 50 words no tensor is larger than the logits of three, or the head."""
    monkeypatch.setattr(loss, "LOGITS_MAX", 3 * 50)
    hidden_TD, head_VD, targets_T = inputs()
    sizes: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                made.numel() for made in torch.utils._pytree.tree_leaves(out) if isinstance(made, torch.Tensor)
            )
            return out

    with Counting():
        token_loss(hidden_TD, head_VD, targets_T)[0].backward()
    assert max(sizes) == head_VD.numel() == 400
    monkeypatch.setattr(loss, "LOGITS_MAX", 1 << 28)
    with Counting():
        token_loss(hidden_TD, head_VD, targets_T)[0].backward()
    assert max(sizes) == 20 * 50, "the whole of them would be seen"


def test_a_loss_without_gradient_forms_none() -> None:
    hidden_TD, head_VD, targets_T = inputs()
    with torch.no_grad():
        total, _ = token_loss(hidden_TD, head_VD, targets_T)
    assert not total.requires_grad
    torch.testing.assert_close(total, token_loss(hidden_TD, head_VD, targets_T)[0].detach())


def test_a_fully_masked_stream_costs_nothing_and_still_has_gradients() -> None:
    hidden_TD, head_VD, targets_T = inputs()
    total, count = token_loss(hidden_TD, head_VD, torch.full_like(targets_T, IGNORED_TARGET))
    total.backward()
    assert total.item() == 0.0
    assert int(count) == 0
    assert hidden_TD.grad is not None
    assert hidden_TD.grad.abs().max() == 0


@pytest.mark.parametrize("impossible", [None, 0, 25])
def test_ranks_that_share_the_words_have_the_loss_and_gradients_of_one(impossible: int | None) -> None:
    """Also where the first word of a rank is all but impossible: its log-probability has no digits left for a sum."""
    hidden_TD, head_VD, targets_T = inputs()
    with torch.no_grad():
        hidden_TD[:, 0] = 1.0
        if impossible is not None:
            head_VD[impossible, 0] = -1e5
            targets_T[targets_T == impossible] = 1
    expected = torch.nn.functional.cross_entropy(
        hidden_TD.double() @ head_VD.double().T, targets_T, ignore_index=IGNORED_TARGET, reduction="sum"
    )
    wanted = torch.autograd.grad(expected, (hidden_TD, head_VD))
    parts = 2
    given: list[Tensor | None] = [None] * parts
    barrier = threading.Barrier(parts, timeout=60)

    def rank(place: int) -> tuple[Tensor, Tensor, Tensor]:
        words_VD = head_VD.detach().chunk(parts)[place].clone().requires_grad_()
        states_TD = hidden_TD.detach().clone().requires_grad_()
        total, _ = token_loss(states_TD, words_VD, targets_T, Thread(place, given, barrier))
        of_states, of_words = torch.autograd.grad(total, (states_TD, words_VD))
        return total.detach(), of_states, of_words

    with ThreadPoolExecutor(parts) as pool:
        totals, states, words = zip(*pool.map(rank, range(parts)), strict=True)
    for total in totals:
        torch.testing.assert_close(total, expected.float(), rtol=1e-6, atol=0.0)
    # A gradient of hidden states is the sum over ranks.
    for seen, right in zip((torch.stack(states).sum(0), torch.cat(words)), wanted, strict=True):
        assert (seen - right).norm() < 2e-6 * right.norm()
