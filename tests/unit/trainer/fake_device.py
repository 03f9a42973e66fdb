"""An accelerator without memory: tensors that have shape, type and device, but no values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model import patch_grid
from polyreme_trainer.model.vlm import KimiVL


@contextlib.contextmanager
def fake_device() -> Iterator[torch.device]:
    """Make every tensor one without values."""
    # A fake device has no pinned memory.
    with mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor), FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.device("cuda", 0)
    # Tables of grids are kept for the process: those without values would come out in another test.
    patch_grid._grid_tables.cache_clear()


def empty(shape: ModelShape, device: torch.device, *, media_token: int = 1) -> KimiVL:
    """A model whose parameters lie on the device, without memory."""
    with torch.device("meta"):
        model = KimiVL(shape, media_token=media_token)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            module.register_parameter(name, nn.Parameter(made))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    return model
