"""The tower and the projector on the device equal a CPU's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.vlm import KimiVL
from tests.device.conftest import HALF_BOUND, SINGLE_BOUND, relative

pytestmark = pytest.mark.device

SHAPE = dataclasses.replace(
    KIMI_VL_NANO,
    # Heads of 72 numbers, as MoonViT's are.
    vision=dataclasses.replace(KIMI_VL_NANO.vision, width=288, ffn_width=1076, position_rows=64),
)
GRIDS = [(4, 6), (16, 16), (2, 2), (10, 8)]


def features_of(device: torch.device, dtype: torch.dtype, grids: list[tuple[int, int]]) -> tuple[KimiVL, Tensor]:
    patches = sum(rows * columns for rows, columns in grids)
    patches_PC = torch.randn(patches, 588, generator=torch.Generator().manual_seed(4)).to(device)
    model = build_model(SHAPE, seed=3, media_token=0, device=device, dtype=dtype)
    return model, model.image_features(patches_PC, grids)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2 * HALF_BOUND), (torch.float32, SINGLE_BOUND)])
def test_features_and_their_gradients_are_those_of_a_processor(
    device: torch.device, dtype: torch.dtype, bound: float
) -> None:
    results: list[dict[str, Tensor]] = []
    for where, kind in ((device, dtype), (torch.device("cpu"), torch.float32)):
        model, features_MD = features_of(where, kind, GRIDS)
        features_MD.float().square().sum().backward()
        named = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"features": features_MD, **{name: grad for name, grad in named.items() if grad is not None}})
    found, expected = results
    assert found.keys() == expected.keys()
    assert relative(found["features"], expected["features"]) < bound
    for name, value in expected.items():
        # Gradients pass two blocks more than features do.
        assert relative(found[name], value) < 5 * bound, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_images_give_no_rows_and_gradients_of_zero(device: torch.device, dtype: torch.dtype) -> None:
    model, features_MD = features_of(device, dtype, [])
    assert features_MD.shape == (0, SHAPE.decoder.width)
    features_MD.sum().backward()
    gradients = [parameter.grad for parameter in model.vision_tower.parameters()]
    assert all(grad is not None and not grad.any() for grad in gradients)
