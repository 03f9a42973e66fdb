"""Waits of the host for its accelerator, by place: one a step, one a layer where rows are exchanged unevenly."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist

from polyreme_api.store import ObjectStore
from polyreme_planner.costs import Recompute
from polyreme_planner.flops import Mix
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.attention_tiles import Partial, Rows, attend_tile, tiles, with_edges
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.model.routing import Routing
from polyreme_trainer.model.stage import Stage
from polyreme_trainer.parallel.communicators import Communicators
from polyreme_trainer.parallel.context import StreamCut
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.mesh import Meshes, open_meshes
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings
from polyreme_trainer.train.state import backward, open_state, reduce, update
from tests.unit.trainer.fake_device import empty
from tests.unit.trainer.host_waits import HostWaits

MICROBATCHES, LAYERS = 2, 3
SHAPE = dataclasses.replace(
    KIMI_VL_NANO, decoder=dataclasses.replace(KIMI_VL_NANO.decoder, layers=LAYERS + 1, dense_layers=1)
)
MIX = Mix(sequence_tokens=48, image_patches=64, visual_share=0.4)
ONE = {"parallel/gradients.py": 1}
"""The step's one wait: loss, norm, counts, requests and routing of all ranks."""


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield open_meshes(Layout(), Communicators(timeout_s=60))
    dist.destroy_process_group()


def waits(meshes: Meshes, options: ComputeOptions, *, uneven: bool) -> dict[str, int]:
    """Count those of a step like any other: the first one makes tables that are kept."""
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=Layout(),
        shape=SHAPE,
        steps=2,
        checkpoint=CheckpointSettings(store=cast("ObjectStore", None)),
        compute_options=options,
    )
    state = open_state(settings, meshes, media_token=MEDIA_TOKEN)
    for module in state.stages[0].modules():
        if isinstance(module, MixtureOfExperts) and uneven:
            module.dispatcher = AllToAllDispatcher(meshes.world_group)
    batches = [synthetic_packs(SHAPE, MIX, packs=2, seed=seed) for seed in range(MICROBATCHES)]

    def step() -> None:
        microbatches = [to_inputs(batch, device="cpu", media_token=MEDIA_TOKEN) for batch in batches]
        total = reduce(state, backward(state, *microbatches), meshes)
        update(state, total, settings.optimizer, rate=1e-3)
        Routing.from_numbers(total.reported_MX).summary(experts_per_token=2)

    step()
    watch = HostWaits()
    with watch:
        step()
    return dict(watch.waits)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_a_step_waits_once(meshes: Meshes, recompute: Recompute) -> None:
    assert waits(meshes, ComputeOptions(recompute=recompute), uneven=False) == ONE


@pytest.mark.parametrize("recompute", Recompute)
def test_an_uneven_exchange_waits_once_a_layer_however_it_is_recomputed(meshes: Meshes, recompute: Recompute) -> None:
    expected = {"parallel/dispatch.py": LAYERS * MICROBATCHES} | ONE
    assert waits(meshes, ComputeOptions(recompute=recompute), uneven=True) == expected


def test_an_even_exchange_waits_for_nothing(meshes: Meshes) -> None:
    assert waits(meshes, ComputeOptions(capacity_factor=1.25), uneven=True) == ONE


def test_a_microbatch_is_copied_to_the_device_without_a_wait(device: torch.device) -> None:
    """Inputs, tables of the tower, and the ends of documents and images: one pinned copy each."""
    batch = synthetic_packs(SHAPE, MIX, packs=8, seed=0)
    stage = Stage(empty(SHAPE, device, media_token=MEDIA_TOKEN))
    watch = HostWaits()
    with watch:
        stage(microbatch=to_inputs(batch, device=device, media_token=MEDIA_TOKEN))
    assert watch.waits == {}
    assert watch.copies == {"train/inputs.py": 1, "model/vision.py": 1, "model/segment_attention.py": 2}


def test_the_edges_of_all_tiles_of_a_ring_are_one_copy(device: torch.device) -> None:
    cut, offsets = StreamCut(tokens=256, ring=4, ulysses=1), [0, 100, 180, 256]
    rows = Rows(*(torch.empty(64, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3)))
    watch = HostWaits()
    with watch:
        found = [tiles(cut.pieces(0), cut.pieces(place), offsets) for place in range(cut.ring)]
        placed = with_edges(found, device=device, dtype=torch.bfloat16)
        for _ in range(LAYERS):
            seen = Partial.nothing(rows.q_THQ)
            for tile in itertools.chain(*placed):
                seen.add(tile, *attend_tile(tile, rows))
    assert watch.waits == {}
    assert watch.copies == {"model/attention_tiles.py": 1}
