"""Small parts of a dense layer are one graph for torch's compiler; the eager backend says so without compiling."""

from __future__ import annotations

import subprocess
import sys
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
def test_norm_router_gate_and_rotation_are_each_one_graph() -> None:
    # In a process of its own: what other tests have patched or imported stays in the compiler's tables.
    ended = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def check() -> None:
    """Trace each part; a graph that breaks raises."""
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
        whole = torch.compile(part, fullgraph=True, backend="eager")
        torch.testing.assert_close(whole(*given), part(*given), rtol=0, atol=0, msg=name)


if __name__ == "__main__":
    check()
