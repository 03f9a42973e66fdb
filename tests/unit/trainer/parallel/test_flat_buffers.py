"""Flat buffers hold the same numbers as the parameters they replace."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from polyreme_trainer.parallel.flat_buffers import FlatModel, FlatParameters, Slices, flatten
from polyreme_trainer.parallel.flat_layout import Shares
from polyreme_trainer.parallel.gradients import GlobalStep, gradient_scale


def small() -> tuple[nn.Module, FlatModel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    return model, flatten(dict(model.named_parameters()), experts=Slices(names=frozenset({"2.weight"})), piggybacked=4)


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
    flat.dense.piggybacked.fill_(7.0)
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
    assert flat.dense.piggybacked.tolist() == [7.0] * 4


def test_matrices_stand_before_vectors_and_every_slot_is_aligned() -> None:
    _, flat = small()
    assert all(slot.start % 16 == 0 for slot in flat.dense.slots)
    assert all((slot.start < flat.dense.matrices_end) == (len(slot.shape) > 1) for slot in flat.dense.slots)


def test_clipping_scales_by_the_norm_of_the_mean_gradient() -> None:
    def step(norm: float) -> GlobalStep:
        return GlobalStep(
            loss=1.0,
            gradient_norm=norm,
            counted=10,
            routing_MX=torch.zeros(1, 2),
            reported_MX=torch.zeros(1, 2),
            stop=False,
            save=False,
            refresh=False,
        )

    assert gradient_scale(step(0.5), norm_max=1.0) == 0.1
    assert gradient_scale(step(4.0), norm_max=1.0) == pytest.approx(0.025)
    assert gradient_scale(step(4.0), norm_max=0.0) == 0.1


@pytest.mark.parametrize("bucket_scalars", [600, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 5])
def test_whole_matrices_lie_in_one_share_and_buckets_in_equal_ones(ranks: int, bucket_scalars: int) -> None:
    shapes = {f"whole.{number}": (9, 10 + number) for number in range(30)} | {"table": (50, 7), "norm": (33,)}
    whole = [name for name in shapes if name.startswith("whole")]
    flat = FlatParameters(
        ((name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()),
        whole=whole,
        shares=Shares(count=ranks, place=1, bucket_scalars=bucket_scalars),
    )
    edges = [(bucket.start, bucket.end) for bucket in flat.buckets]
    assert edges[0][0] == 0
    assert edges[-1][1] == flat.length
    assert all(one[1] == other[0] for one, other in itertools.pairwise(edges))
    assert all(bucket.length % (16 * ranks) == 0 for bucket in flat.buckets)
    assert float(flat.values.sum()) == sum(math.prod(shape) for shape in shapes.values()), "no two overlap"
    for slot in flat.slots:
        bucket = next(bucket for bucket in flat.buckets if bucket.start <= slot.start < bucket.end)
        assert bucket.whole == (slot.name in whole)
        if bucket.whole:
            share = bucket.length // ranks
            assert (slot.start - bucket.start) // share == (slot.start + slot.length - 1 - bucket.start) // share
    if bucket_scalars == 600 and ranks == 2:
        assert sum(bucket.whole for bucket in flat.buckets) == 3, "four matrices a share at least"
    used = sum(16 * -(-math.prod(shapes[name]) // 16) for name in whole)
    assert flat.whole_end <= 1.34 * used
