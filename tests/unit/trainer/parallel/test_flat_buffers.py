"""Flat buffers hold the same numbers as the parameters they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyreme_trainer.parallel.flat import FlatModel, Slices, flatten
from polyreme_trainer.parallel.gradients import GlobalStep, gradient_scale


def small() -> tuple[nn.Module, FlatModel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    return model, flatten(dict(model.named_parameters()), experts=Slices(names=frozenset({"2.weight"})), riders=4)


def test_parameters_keep_their_values_and_become_views() -> None:
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2)).state_dict()
    model, flat = small()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    flat.dense.values.zero_()
    assert float(model.get_parameter("0.weight").detach().abs().max()) == 0.0
    assert float(model.get_parameter("2.weight").detach().abs().max()) > 0.0


def test_backward_accumulates_into_the_buffers_and_leaves_riders_alone() -> None:
    model, flat = small()
    flat.dense.riders.fill_(7.0)
    torch.manual_seed(1)
    x = torch.randn(4, 5)
    model(x).square().sum().backward()
    gradients = dict(flat.dense.views(flat.dense.gradients)) | dict(
        flat.experts.flat.views(flat.experts.flat.gradients)
    )
    plain = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    plain.load_state_dict(model.state_dict())
    plain(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], parameter.grad), name
    assert flat.dense.riders.tolist() == [7.0] * 4


def test_matrices_stand_before_vectors_and_every_slot_is_aligned() -> None:
    _, flat = small()
    assert all(slot.start % 16 == 0 for slot in flat.dense.slots)
    assert all((slot.start < flat.dense.matrices_end) == (len(slot.shape) > 1) for slot in flat.dense.slots)


def test_clipping_scales_by_the_norm_of_the_mean_gradient() -> None:
    def step(norm: float) -> GlobalStep:
        return GlobalStep(
            loss=1.0, gradient_norm=norm, unmasked=10, routing_MX=torch.zeros(1, 2), stop=False, save=False
        )

    assert gradient_scale(step(0.5), norm_max=1.0) == 0.1
    assert gradient_scale(step(4.0), norm_max=1.0) == pytest.approx(0.025)
    assert gradient_scale(step(4.0), norm_max=0.0) == 0.1
