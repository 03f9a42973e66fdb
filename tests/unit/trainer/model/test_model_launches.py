"""The planner's fixed cost of a layer against the operations that the trainer runs, whatever their tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme_planner.flops import BACKWARD_MOVES, launches
from polyreme_planner.model_parts import Part
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.segment_attention import segments

TOKENS = 32


class Operations(TorchDispatchMode):
    """Counts operations that write a tensor: each is a kernel on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += int(not func.is_view and "empty" not in str(func))
        return func(*args, **(kwargs or {}))


def operations(layers: int, dense_layers: int) -> int:
    """Operations of forward and backward of a decoder."""
    decoder = dataclasses.replace(KIMI_VL_NANO.decoder, layers=layers, dense_layers=dense_layers)
    model = build_model(dataclasses.replace(KIMI_VL_NANO, decoder=decoder), seed=0, media_token=1).language_model.model
    attend = segments([TOKENS], causal=True, device=torch.device("cpu"), dtype=torch.float32).attend
    x_SD = torch.randn(TOKENS, decoder.width, requires_grad=True)
    seen = Operations()
    with seen:
        out = model(x_SD, torch.arange(TOKENS), lambda _: attend)
        out.hidden_TD.square().sum().backward()
    return seen.count


@pytest.mark.parametrize(("part", "more"), [(Part.DENSE, (3, 2)), (Part.MOE, (3, 1))])
def test_a_layer_runs_about_as_many_operations_as_are_planned(part: Part, more: tuple[int, int]) -> None:
    seen = operations(*more) - operations(2, 1)
    planned = launches(KIMI_VL_NANO)[part] * (1 + BACKWARD_MOVES)
    assert planned == pytest.approx(seen, rel=0.25)
