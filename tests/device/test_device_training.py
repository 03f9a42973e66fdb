"""A training step on the device equals a CPU's; state may live in host memory; copies are of one moment."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from polyreme_api.errors import EnvironmentFailedError
from polyreme_launcher.rank_processes import with_torch_settings
from polyreme_planner.adapters import EXPERTS_RANK_STEP, Adapters, Target
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import HARDWARE
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.checkpoint.save import AfterStep, CheckpointWriter, Identity
from polyreme_trainer.checkpoint.staging import Staging
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.device import full_memory, take_device
from polyreme_trainer.parallel.gradients import squared_norm
from polyreme_trainer.parallel.world import World, open_world
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.checkpoint_content import content, restored
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.settings import OptimizerName, OptimizerSettings, Precision, TrainSettings
from polyreme_trainer.train.state import TrainState, backward, open_state, reduce, update
from tests.device.conftest import relative, settings_of

pytestmark = pytest.mark.device

PROCESSOR = torch.device("cpu")
MIX = Mix(sequence_tokens=48, image_patches=64, visual_share=0.4)
STEPS, RATE = 4, 1e-3
HALF_LOSS_BOUND, HALF_NORM_BOUND = 1e-2, 5e-2
"""Of a loss and of a gradient's norm in bfloat16, against float32: sums over many rounded numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Reports of some steps."""

    losses: list[float]
    norms: list[float]
    first_gradients: dict[str, Tensor]
    values: dict[str, Tensor]


def trained(device: torch.device, folder: Path, **changes: Any) -> Trained:
    settings = settings_of(device, folder, **changes)
    losses, norms, first = [], [], {}
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
        for number in range(STEPS):
            losses_norms = step_of(state, world, settings, seed=number % 2)
            losses.append(losses_norms[0])
            norms.append(losses_norms[1])
            if not number:
                first = named(state, gradients=True)
        return Trained(losses=losses, norms=norms, first_gradients=first, values=named(state))


def step_of(state: TrainState, world: World, settings: TrainSettings, *, seed: int) -> tuple[float, float]:
    batch = synthetic_packs(KIMI_VL_NANO, MIX, packs=3, seed=seed)
    inputs = to_inputs(batch, device=settings.rank.device_type)
    total = reduce(state, backward(state, inputs), world.meshes)
    update(state, total, settings.optimizer, rate=RATE)
    return total.loss, total.gradient_norm


def named(state: TrainState, *, gradients: bool = False) -> dict[str, Tensor]:
    return {
        name: tensor.detach().float().cpu().clone()
        for part in state.flat.parts
        for name, tensor in part.views(part.gradients if gradients else part.values)
    }


@pytest.mark.parametrize("optimizer", [OptimizerName.ADAMW, OptimizerName.MUON])
def test_float32_steps_are_those_of_a_processor(device: torch.device, tmp_path: Path, optimizer: OptimizerName) -> None:
    settings = OptimizerSettings(name=optimizer)
    there, here = (trained(where, tmp_path, optimizer=settings) for where in (device, PROCESSOR))
    assert there.losses[0] == pytest.approx(here.losses[0], rel=1e-5)
    assert there.norms[0] == pytest.approx(here.norms[0], rel=1e-5)
    for name, expected in here.first_gradients.items():
        # AdamW's fused kernel leaves gradients divided by the scale on both.
        assert relative(there.first_gradients[name], expected) < 5e-5, name
    # Directions of Muon are bfloat16 on a device.
    later = 1e-4 if optimizer is OptimizerName.ADAMW else 1e-2
    assert there.losses == pytest.approx(here.losses, rel=later)


def test_bfloat16_steps_are_near_those_of_a_processor_in_float32(device: torch.device, tmp_path: Path) -> None:
    there = trained(device, tmp_path, precision=Precision.BFLOAT16)
    here = trained(PROCESSOR, tmp_path)
    assert there.losses == pytest.approx(here.losses, rel=HALF_LOSS_BOUND)
    assert there.norms[0] == pytest.approx(here.norms[0], rel=HALF_NORM_BOUND)
    assert there.losses[-1] < there.losses[1]


def test_adapters_learn_as_on_a_processor(device: torch.device, tmp_path: Path) -> None:
    """Grouped products of experts take the least rank that is allowed, in bfloat16 too."""
    adapters = Adapters(rank=EXPERTS_RANK_STEP, alpha=16.0, targets=frozenset(Target))
    there, here = (trained(where, tmp_path, adapters=adapters) for where in (device, PROCESSOR))
    for name, expected in here.first_gradients.items():
        if name.endswith("lora_B"):  # with B zero, the first gradient of A is zero
            assert relative(there.first_gradients[name], expected) < 5e-5, name
    assert there.losses == pytest.approx(here.losses, rel=1e-4)
    half = trained(device, tmp_path, adapters=adapters, precision=Precision.BFLOAT16)
    assert half.losses == pytest.approx(here.losses, rel=HALF_LOSS_BOUND)


@pytest.mark.parametrize("name", [OptimizerName.ADAMW, OptimizerName.MUON])
def test_state_in_host_memory_changes_no_bit(device: torch.device, tmp_path: Path, name: OptimizerName) -> None:
    """Streams of so few tokens are dense products, which add up in one order; state makes many visits a step."""
    kept, away = (
        trained(device, tmp_path, optimizer=OptimizerSettings(name=name, state_on_host=on_host, bucket_scalars=1 << 14))
        for on_host in (False, True)
    )
    assert kept.losses == away.losses
    assert all(torch.equal(value, away.values[name]) for name, value in kept.values.items())


def test_state_in_host_memory_is_pinned(device: torch.device, tmp_path: Path) -> None:
    settings = settings_of(
        device, tmp_path, optimizer=OptimizerSettings(state_on_host=True), precision=Precision.BFLOAT16
    )
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
        step_of(state, world, settings, seed=0)
        buffers = [buffer for own in state.optimizer.states for _, buffer, _ in own.buffers() if buffer.numel()]
        buffers += [part.masters for part in state.flat.parts if part.masters is not None and part.masters.numel()]
        for buffer in buffers:
            assert buffer.is_pinned()
            assert buffer.untyped_storage().nbytes() == buffer.nbytes  # torch's own would be a power of two


def test_a_staged_copy_is_of_the_moment_at_which_it_was_asked_for(
    device: torch.device, world: World, tmp_path: Path
) -> None:
    """The step goes on at once, and overwrites what is being copied."""
    settings = settings_of(device, tmp_path)
    state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
    step_of(state, world, settings, seed=0)
    staging = Staging()
    given = content(state, world.meshes)
    for _ in range(2):
        expected = [buffer.cpu().clone() for buffer in given.buffers()]
        staged = staging.stage(given)
        for buffer in given.buffers():
            buffer.zero_()
        found = staged.wait().buffers()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert any(bool(one.any()) for one in found)
        for buffer, value in zip(given.buffers(), expected, strict=True):
            buffer.copy_(value)
    on_device = [kept for kept, live in zip(staging.buffers, given.buffers(), strict=True) if live.is_cuda]
    assert on_device
    assert all(buffer.is_pinned() for buffer in on_device)


def test_a_checkpoint_that_was_saved_while_steps_went_on_is_loaded_bit_by_bit(
    device: torch.device, world: World, tmp_path: Path
) -> None:
    settings = settings_of(device, tmp_path, precision=Precision.BFLOAT16)
    store = settings.checkpoint.store
    state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
    step_of(state, world, settings, seed=0)
    expected = [buffer.cpu().clone() for buffer in content(state, world.meshes).buffers()]
    identity = Identity(store=store, attempt=1, shape=KIMI_VL_NANO, plan_hash="p", rule=Rule(kept=2))
    with CheckpointWriter(
        identity, group=world.meshes.control_group, now_s=lambda: 1.0, committed=lambda _: None
    ) as writer:
        writer.start(content(state, world.meshes), step=1, after=AfterStep(loader={}))
        step_of(state, world, settings, seed=1)
        writer.wait()
    other = open_state(dataclasses.replace(settings, seed=9), world.meshes, media_token=MEDIA_TOKEN)
    held = content(other, world.meshes)
    marker = open_checkpoint(store, "a000001-s00000001", KIMI_VL_NANO)
    load_checkpoint(held, marker, store, "a000001-s00000001", group=world.meshes.control_group)
    restored(other)
    found = [buffer.cpu() for buffer in content(other, world.meshes).buffers()]
    assert all(torch.equal(one, saved) for one, saved in zip(found, expected, strict=True))
    assert step_of(other, world, settings, seed=1)[0] > 0


def test_the_squared_norm_of_many_gradients_is_that_of_float64(device: torch.device) -> None:
    gradients = torch.randn(30_000_000, generator=torch.Generator().manual_seed(0))
    expected = float(gradients.double().square().sum())
    assert float(squared_norm(gradients.to(device))) == pytest.approx(expected, rel=1e-6)


def test_collectives_of_a_group_of_one(device: torch.device, world: World) -> None:
    group = world.meshes.world_group
    rows_SD = torch.arange(12.0, device=device).view(4, 3)
    assert collectives.largest_number(3, group) == 3
    assert torch.equal(collectives.exchange_rows(rows_SD, sent=[4], received=[4], group=group), rows_SD)
    counts_E = torch.tensor([3, 1], device=device)
    assert torch.equal(collectives.exchange_counts(counts_E, group), counts_E.view(1, 2))
    own, whole = torch.empty_like(rows_SD), torch.empty_like(rows_SD)
    collectives.begin_reduce_scatter(own, rows_SD, group).wait()
    collectives.begin_gather(whole, own, group).wait()
    assert torch.equal(whole, rows_SD)
    summed = rows_SD.clone()
    dist.all_reduce(summed, group=group)
    assert torch.equal(summed, rows_SD)
    assert collectives.gather_to_all("word", world.meshes.control_group) == ["word"]
    assert ("nccl" in dist.get_backend(group)) == (device.type == "cuda")


def test_groups_are_bound_to_the_device_and_recorded(device: torch.device, world: World) -> None:
    meshes = world.meshes
    assert dist.get_backend(meshes.control_group) == "gloo"
    bound = {each.group.bound_device_id for each in meshes.communicators.opened}
    assert bound == {device if device.type == "cuda" else None}
    summed = torch.ones(1, device=device)
    dist.all_reduce(summed, group=meshes.world_group)
    assert summed.item() == 1.0
    if device.type == "cuda":
        assert json.loads(_distributed_c10d._dump_nccl_trace_json())["entries"]  # type: ignore[attr-defined]


def fail_in_flight(opened: World, device: torch.device) -> None:
    dist.all_reduce(torch.ones(1 << 20, device=device), group=opened.meshes.world_group, async_op=True)
    raise ZeroDivisionError


def test_after_an_error_in_a_world_another_one_can_be_opened(device: torch.device, tmp_path: Path) -> None:
    """Groups are aborted with an exchange in flight."""
    for _ in range(2):
        settings = settings_of(device, tmp_path)
        with pytest.raises(ZeroDivisionError), open_world(settings.rank, settings.layout) as opened:
            fail_in_flight(opened, device)


def test_memory_comes_in_segments_that_grow(device: torch.device) -> None:
    """The settings of ranks, in a process that starts with them."""
    code = (
        "import torch; kept = torch.ones(1 << 24, device='cuda'); "
        "assert all(each['is_expandable'] for each in torch.cuda.memory_snapshot())"
    )
    given = with_torch_settings(os.environ, Path.cwd())
    if device.type == "cuda":
        subprocess.run([sys.executable, "-c", code], env=given, check=True)


def test_rank_waits_while_another_process_holds_the_memory(device: torch.device) -> None:
    seen = torch.cuda.get_device_name(device)
    known = [hardware for hardware in HARDWARE.values() if hardware.is_called(seen)]
    for hardware in known:
        held = torch.empty(
            torch.cuda.mem_get_info(device)[0] - (hardware.usable_bytes >> 1), dtype=torch.uint8, device=device
        )
        with pytest.raises(EnvironmentFailedError, match="memory of device 0 is in use"):
            take_device(hardware.name, local_rank=0, pause=lambda _: None)
        del held
        torch.cuda.empty_cache()


def test_the_rank_takes_this_device_and_no_other(device: torch.device) -> None:
    seen = torch.cuda.get_device_name(device)
    known = [hardware.name for hardware in HARDWARE.values() if hardware.is_called(seen)]
    for name in known:
        assert take_device(name, local_rank=0) == "cuda"
        with pytest.raises(EnvironmentFailedError, match="has no device of its own"):
            take_device(name, local_rank=torch.cuda.device_count())


def test_a_full_device_is_known_by_its_words(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError) as full:
        torch.empty(1 << 48, dtype=torch.uint8, device=device)
    assert "out of memory" in (full_memory(full.value) or "")
