"""What the checks of a device and a disk measure, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyreme_system.clock import SystemClock
from polyreme_trainer import node_checks

CPU = torch.device("cpu")


def test_a_good_device_and_disk_have_rates(tmp_path: Path) -> None:
    clock = SystemClock()
    assert node_checks.compute_rate(CPU, clock) > 0.1
    assert node_checks.memory_rate(CPU, clock) > 10
    assert node_checks.disk_rate(tmp_path / "new", clock) > 0.1
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("at", [(0, 0), (17, 200), (383, 383)])
def test_one_wrong_element_of_a_product_is_found(at: tuple[int, int]) -> None:
    def disturb(product: torch.Tensor) -> None:
        product[at] += 1.0

    with pytest.raises(node_checks.WrongResultError, match="small integers is wrong"):
        node_checks.compute_rate(CPU, SystemClock(), disturb=disturb)
