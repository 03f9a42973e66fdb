"""Gradients of bfloat16 parameters are added to float32 buffers as they come: no copy in float32, the same bits."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme_api.store import ObjectStore
from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.costs import Recompute
from polyreme_planner.flops import Mix
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.parallel.communicators import Communicators
from polyreme_trainer.parallel.flat_buffers import Storage, Update, flatten
from polyreme_trainer.parallel.mesh import Meshes, open_meshes
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.settings import CheckpointSettings, Precision, TrainSettings
from polyreme_trainer.train.state import backward, open_state

ADAPTERS = Adapters(rank=8, alpha=8.0, targets=frozenset(Target))
NARROW = Update(storage=Storage(dtype=torch.bfloat16))


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, called: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.counts[called.__name__.partition(".")[0]] += 1
        return called(*given, **(named or {}))


def test_a_gradient_is_added_without_a_copy() -> None:
    weight, experts = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(2, 16, 16))
    flat = flatten({"weight": weight, "experts": experts}, piggybacked=0, update=NARROW)
    x_TD, ends_E = torch.randn(8, 16, dtype=torch.bfloat16), torch.tensor([4, 8], dtype=torch.int32)
    made = nn.functional.grouped_mm(nn.functional.linear(x_TD, weight), experts, offs=ends_E)
    with (operations := Operations()):
        made.backward(torch.ones_like(made))
    assert operations.counts["_to_copy"] == 0
    assert operations.counts["add_"] == 2
    assert weight.grad is not None
    assert weight.grad.data_ptr() in {slot.view(flat.dense.gradients).data_ptr() for slot in flat.dense.slots}


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield open_meshes(Layout(), Communicators(timeout_s=60))
    dist.destroy_process_group()


def gradients(meshes: Meshes, *, copied: bool, **changes: Any) -> list[Tensor]:
    """Those of two microbatches; ``copied``: as torch adds them after a conversion of each to float32."""
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=Layout(),
        shape=KIMI_VL_NANO,
        steps=1,
        precision=Precision.BFLOAT16,
        checkpoint=CheckpointSettings(store=cast("ObjectStore", None)),
        **changes,
    )
    state = open_state(settings, meshes, media_token=MEDIA_TOKEN)
    for _, parameter in (each for part in state.flat.parts for each in part.parameters()):
        if copied:
            parameter.grad_dtype = torch.float32
    mix = Mix(sequence_tokens=48, image_patches=64, visual_share=0.4)
    packs = (synthetic_packs(KIMI_VL_NANO, mix, packs=2, seed=seed) for seed in range(2))
    backward(state, *(to_inputs(pack, device="cpu", media_token=MEDIA_TOKEN) for pack in packs))
    return [part.gradients for part in state.flat.parts]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compute_options": ComputeOptions(recompute=Recompute.FULL, capacity_factor=1.25)},
        {"compute_options": ComputeOptions(recompute=Recompute.SELECTIVE), "adapters": ADAPTERS},
    ],
    ids=["plain", "full, capacity", "selective, adapters"],
)
def test_no_parameter_gets_two_gradients_that_are_added_before(meshes: Meshes, changes: dict[str, Any]) -> None:
    """Two would be added in bfloat16 first, and the bits would differ."""
    found, expected = (gradients(meshes, copied=copied, **changes) for copied in (False, True))
    assert any(bool(each.count_nonzero()) for each in found)
    assert all(map(torch.equal, found, expected))
