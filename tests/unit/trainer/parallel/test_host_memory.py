"""Pinned memory is as large as asked for, and is let go before it is unmapped."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from polyreme_trainer.parallel.host_memory import pinned_zeros

LENGTH = 3 * 1024 + 1  # no power of two


class Pinned:
    """What is pinned, by its address, with its size."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def pin(self, address: int, size: int) -> Callable[[], object]:
        self.held[address] = size
        return lambda: self.held.pop(address)


def test_no_more_is_pinned_than_asked_for_and_until_the_last_view_has_gone() -> None:
    pinned = Pinned()
    zeros = pinned_zeros(LENGTH, torch.bfloat16, pin=pinned.pin)
    assert pinned.held == {zeros.data_ptr(): 2 * LENGTH}
    assert zeros.untyped_storage().nbytes() == 2 * LENGTH
    assert not zeros.any()
    view = zeros[5:].view(-1, 4)
    del zeros
    gc.collect()
    assert pinned.held
    view.fill_(1)
    del view
    gc.collect()
    assert not pinned.held


def test_nothing_takes_no_memory() -> None:
    pinned = Pinned()
    assert pinned_zeros(0, pin=pinned.pin).shape == (0,)
    assert not pinned.held


def test_memory_that_the_system_will_not_pin_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int, size: int) -> Callable[[], object]:
        raise torch.cuda.CudaError(2)  # torch words it by its own runtime, where it has one

    zeros = pinned_zeros(LENGTH, pin=refuse)
    assert zeros.fill_(2).sum() == 2 * LENGTH
    assert f"can't pin {4 * LENGTH} bytes" in caplog.text
