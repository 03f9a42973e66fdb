"""Small parts of a dense layer are one graph for torch's compiler; the eager backend says so without compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.attention import RMSNorm
from polyreme_trainer.model.moe import Router, _gated
from polyreme_trainer.model.rotary import patch_turns, rotate


@pytest.mark.slow
# torch's compiler makes an object of a function's class.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_norm_router_gate_and_rotation_are_each_one_graph() -> None:
    torch.manual_seed(0)
    shape = KIMI_VL_NANO.decoder
    router = Router(shape)
    torch.nn.init.normal_(router.weight)
    x_TD, places = torch.randn(8, shape.width), torch.arange(8)
    turns = patch_turns(places, places, head_dim=8, theta=10_000.0)
    parts: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "norm": (RMSNorm(shape.width, 1e-6), (x_TD,)),
        "router": (router, (x_TD,)),
        "gate": (_gated, (x_TD, x_TD)),
        "rotation": (rotate, (torch.randn(8, 2, 8), turns)),
    }
    for name, (part, given) in parts.items():
        whole = torch.compile(part, fullgraph=True, backend="eager")  # raises where a graph breaks
        torch.testing.assert_close(whole(*given), part(*given), rtol=0, atol=0, msg=name)
