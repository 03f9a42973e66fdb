"""A device without memory, for tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.trainer.fake_device import fake_device


@pytest.fixture
def device() -> Iterator[torch.device]:
    with fake_device() as device:
        yield device
