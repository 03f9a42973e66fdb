"""One table of tensor-parallel cuts: parameters are built, drawn, saved and joined by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import KIMI_VL_NANO, model_shape
from polyreme_planner.traffic_volume import shared_parameters
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.sharding import Cut, chunks, cut_of, join, slice_of, whole_shape
from polyreme_trainer.model.tensor import Alone


class Place(Alone):
    """A place among ranks that never speak: enough to build a model."""

    def __init__(self, place: int, parts: int) -> None:
        self.place, self.parts, self.row_parts = place, parts, parts


@pytest.mark.parametrize("parts", [2, 4])
def test_slices_are_of_the_very_values_that_one_rank_draws(parts: int) -> None:
    whole = dict(build_model(KIMI_VL_NANO, seed=3, media_token=1).named_parameters())
    models = [build_model(KIMI_VL_NANO, seed=3, media_token=1, ranks=Place(n, parts)) for n in range(parts)]
    slices = [dict(model.named_parameters()) for model in models]
    for name, parameter in whole.items():
        cut = cut_of(name)
        own = [held[name].detach() for held in slices]
        joined = own[0] if cut is None else join(own, cut)
        assert torch.equal(joined, parameter), name


def test_what_is_cut_is_most_of_the_model_beside_the_routed_experts() -> None:
    named = dict(build_model(KIMI_VL_NANO, seed=3, media_token=1).named_parameters())
    dense = {name: p.numel() for name, p in named.items() if ".experts." not in name}
    assert sum(size for name, size in dense.items() if cut_of(name)) > 0.8 * sum(dense.values())
    assert sum(size for name, size in dense.items() if cut_of(name)) == shared_parameters(KIMI_VL_NANO)
    assert not [name for name in named if ".experts." in name and ".shared_" not in name and cut_of(name)]


@pytest.mark.parametrize("cut", [Cut(dim=0), Cut(dim=1), Cut(dim=0, blocks=3)])
def test_chunks_say_where_the_parts_of_a_slice_lie(cut: Cut) -> None:
    whole = torch.arange(12 * 8).view(12, 8)
    slices = [slice_of(whole, cut, place=place, parts=2) for place in range(2)]
    assert torch.equal(join(slices, cut), whole)
    for place, own in enumerate(slices):
        assert whole_shape(own.shape, cut, 2) == tuple(whole.shape)
        for chunk in chunks(own.shape, cut, place=place, parts=2):
            there: Tensor = whole.narrow(cut.dim, chunk.whole, chunk.length)
            assert torch.equal(own.narrow(cut.dim, chunk.own, chunk.length), there)


def test_heads_that_cannot_be_shared_are_refused_with_their_number() -> None:
    with pytest.raises(InvalidConfigError, match=r"tp=3 must divide the tower's heads \(4\)"):
        build_model(model_shape("kimi-vl-nano"), seed=0, media_token=1, ranks=Place(0, 3))
