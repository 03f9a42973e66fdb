"""A rank of 1,024 that opens its state on an accelerator without memory: what it holds at most, and what is planned."""

from __future__ import annotations

import dataclasses
from typing import cast
from unittest import mock

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyreme_api.store import ObjectStore
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import HARDWARE, MIXED
from polyreme_planner.layout import Layout
from polyreme_planner.memory import memory_of
from polyreme_planner.schedules import Schedule
from polyreme_planner.shapes import DEEPSEEK_V3, KIMI_K2, KIMI_VL_A3B, MOONLIGHT_16B_A3B, ModelShape
from polyreme_trainer.parallel.communicators import Communicators
from polyreme_trainer.parallel.mesh import open_meshes
from polyreme_trainer.parallel.pipeline import PipelineSettings
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train import state
from polyreme_trainer.train.settings import CheckpointSettings, OptimizerSettings, Precision, TrainSettings
from tests.unit.trainer.peak import PeakMemory

WORLD = 1024
STARTS = {
    "kimi-vl-a3b": (KIMI_VL_A3B, Layout(dp=1024, ep=64)),
    "moonlight-16b-a3b": (MOONLIGHT_16B_A3B, Layout(dp=512, cp=2, ep=32)),
    "deepseek-v3": (DEEPSEEK_V3, Layout(dp=64, pp=16, ep=64)),
    "kimi-k2": (KIMI_K2, Layout(dp=64, tp=2, pp=8, ep=128)),
}
"""Presets and their layouts. The first rank is the fullest: it holds embedding, tower and dense layers."""


def shallow(shape: ModelShape, layout: Layout) -> ModelShape:
    """The same model with few layers: all dense ones, one with experts a stage, two of the tower."""
    layers = shape.decoder.dense_layers + layout.pp
    vision = dataclasses.replace(shape.vision, layers=min(2, shape.vision.layers))
    return dataclasses.replace(shape, decoder=dataclasses.replace(shape.decoder, layers=layers), vision=vision)


def split_of(shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Cut the layers with experts evenly; the first stage has all dense ones, and what is left."""
    decoder = shape.decoder
    each = (decoder.layers - decoder.dense_layers) // layout.pp
    return decoder.layers - each * (layout.pp - 1), *[each] * (layout.pp - 1)


def counted_bytes(shape: ModelShape, layout: Layout) -> int:
    """Open the state of rank 0 in bfloat16, its update sharded; count what it holds at most on its device."""
    schedule, layers = (Schedule.ONE_F_ONE_B, split_of(shape, layout)) if layout.pp > 1 else (None, ())
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=WORLD, attempt=1, device_type="cuda"),
        layout=layout,
        shape=shape,
        steps=1,
        checkpoint=CheckpointSettings(store=cast("ObjectStore", None)),
        pipeline=PipelineSettings(schedule=schedule, layers=layers, microbatches=layout.pp),
        precision=Precision.BFLOAT16,
        optimizer=OptimizerSettings(zero1=True),
    )
    meshes, memory = open_meshes(layout, Communicators(timeout_s=60)), PeakMemory("cuda")
    # Tensors without values can't be asked what a product leaves in them.
    known = mock.patch.object(state, "leaves_empty_groups_zero", return_value=True)
    with known, FakeTensorMode(allow_non_fake_inputs=True), memory:
        state.open_state(settings, meshes, media_token=1)
    return memory.peak_bytes


def planned_bytes(shape: ModelShape, layout: Layout) -> int:
    """Return what the planner counts for the same start."""
    mix = Mix(sequence_tokens=4096, image_patches=1024, visual_share=0.5 if shape.sees else 0.0)
    return memory_of(
        Setting(shape=shape, mix=mix, hardware=HARDWARE["h100-80g"], numerics=MIXED),
        layout,
        packs=1,
        microbatches=layout.pp,
        recompute=Recompute.NONE,
        schedule=Schedule.ONE_F_ONE_B if layout.pp > 1 else None,
        split=split_of(shape, layout),
    ).start_bytes


def open_fake_world() -> None:
    """Open a fake group of all ranks in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
