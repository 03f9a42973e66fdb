"""One CUDA device, a world of one rank on it, and how near to a processor's float32 what it computes must be.

Without a device every test fails and says so: nothing is skipped. ``POLYREME_TEST_DEVICE=cpu`` runs what needs none, so
that these tests themselves can be tried on a machine without one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyreme_datahub.objects import open_store
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.parallel.flash import use_newest_flash
from polyreme_trainer.parallel.world import RankSettings, World, open_world
from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings

HALF_BOUND = 2e-2
"""Largest error of a bfloat16 result, as a part of the largest value: eight bits of mantissa, and sums of some hundred
products of rounded factors."""
SINGLE_BOUND = 1e-5


@pytest.fixture(scope="session")
def device(record_testsuite_property: Callable[[str, object], None]) -> torch.device:
    """The device; none fails the test. JUnit's file names the flash kernels that tests ran with."""
    found, flash = take_device()
    record_testsuite_property("flash_kernels", flash)
    return found


def take_device() -> tuple[torch.device, str]:
    """Return the device and its flash kernels: those that ranks choose."""
    kind = os.environ.get("POLYREME_TEST_DEVICE", "cuda")
    if kind == "cpu":
        return torch.device("cpu"), "none"
    if not torch.cuda.is_available():
        pytest.fail("no CUDA device: torch sees none here, tests/device needs one", pytrace=False)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0), use_newest_flash(torch.cuda.get_device_capability())


def settings_of(device: torch.device, folder: Path, **changes: Any) -> TrainSettings:
    """One rank that trains nano; good for one world."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, descriptor = server.getsockname()[1], server.detach()
    rank = RankSettings(rank=0, world=1, attempt=1, master_port=port, master_fd=descriptor, device_type=device.type)
    store = open_store((folder / "root").as_uri())
    given: dict[str, Any] = {"shape": KIMI_VL_NANO, "steps": 10, "checkpoint": CheckpointSettings(store=store)}
    return TrainSettings(rank=rank, layout=Layout(), **given | changes)


@pytest.fixture
def world(device: torch.device, tmp_path: Path) -> Iterator[World]:
    """Groups of one rank: NCCL for what is on the device, gloo for the rest."""
    settings = settings_of(device, tmp_path)
    with open_world(settings.rank, settings.layout) as world:
        yield world


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest value, however small that is."""
    expected = expected.detach().float().cpu()
    return float((found.detach().float().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
