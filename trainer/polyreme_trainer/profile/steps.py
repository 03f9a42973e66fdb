"""A few steps of a job's model under the profiler: time by layer, time by exchange, and a trace to look at.

The data are synthetic, so neither pipeline nor store is needed; the step is the trainer's own.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from polyreme_api.batch import PackedBatch
from polyreme_api.clock import Clock
from polyreme_planner.flops import Mix
from polyreme_trainer.parallel.collectives import all_agree
from polyreme_trainer.parallel.mesh import Meshes, dense_place
from polyreme_trainer.parallel.world import open_world
from polyreme_trainer.profile.spans import Spans, steady, watched
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, backward, open_state, reduce, update

WARM_UP = 1
"""Warm-up steps, before the measured ones."""
EXCHANGES = ("gloo:", "nccl:")
"""Prefix of the profiler's names of exchanges."""
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One row of a table, per step."""

    name: str
    seconds: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    calls: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profile of a rank's steps, each figure for one step on average."""

    rank: int
    step_s: float
    layers: tuple[ProfileRow, ...]
    """In the order of the model, then the rest of the step."""
    exchanges: tuple[ProfileRow, ...]
    """Largest first; from begin to end of each, including the wait for other ranks."""


def profile_rank(
    settings: TrainSettings, mix: Mix, *, packs_per_rank: int, steps: int, trace: Path | None, clock: Clock
) -> Profile:
    """Train a few steps on synthetic packs and report where the time went; all ranks of the layout call it.

    Args:
        settings: As for training; checkpoints, data and export are not used.
        mix: Content of a pack.
        packs_per_rank: Packs of a data-parallel rank in a step.
        steps: Measured steps.
        trace: File for the Chrome trace of this rank, or None.
        clock: Steady time.

    Raises:
        InvalidConfigError: If layout and model do not fit.
        EnvironmentFailedError: If the ranks do not meet.
    """
    torch.set_num_threads(1)
    device = settings.rank.device_type
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
        now_s = steady(clock.steady_s, device)
        spans = Spans(now_s)
        for stage in state.stages.values():
            for name, module in watched(stage):
                spans.watch(name, module)
        batch = synthetic_packs(
            settings.shape,
            mix,
            packs=packs_per_rank // settings.pipeline.microbatches,
            seed=dense_place(settings.layout, world.meshes.rank)["dp"],
        )
        for _ in range(WARM_UP):
            _step(settings, state, world.meshes, batch, spans=spans)
        spans.spent.clear()
        all_agree(True, world.meshes.world_group)  # no rank begins to measure while another still warms up
        with profile(activities=activities) as profiler:
            begin_s = now_s()
            for _ in range(steps):
                _step(settings, state, world.meshes, batch, spans=spans)
            step_s = (now_s() - begin_s) / steps
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    layers = [
        ProfileRow(
            name=name,
            seconds=(spent.forward_s + spent.backward_s) / steps,
            forward_s=spent.forward_s / steps,
            backward_s=spent.backward_s / steps,
        )
        for name, spent in spans.spent.items()
    ]
    rest_s = step_s - sum(line.seconds for line in layers)
    layers.append(ProfileRow(name="embedding, head, loss, sums, update, waiting", seconds=max(0.0, rest_s)))
    return Profile(rank=settings.rank.rank, step_s=step_s, layers=tuple(layers), exchanges=_exchanges(profiler, steps))


def _step(settings: TrainSettings, state: TrainState, meshes: Meshes, batch: PackedBatch, *, spans: Spans) -> None:
    """Train one step; all microbatches are alike."""
    device = settings.rank.device_type
    count = settings.pipeline.microbatches
    local = backward(state, *(to_inputs(batch, device=device, sharing=state.sharing) for _ in range(count)))
    spans.end()
    total = reduce(state, local, meshes)
    update(state, total, settings.optimizer, rate=LEARNING_RATE)


def _exchanges(profiler: profile, steps: int) -> tuple[ProfileRow, ...]:
    """Sum up the exchanges that the profiler saw."""
    spent: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events() or ():
        if event.name.startswith(EXCHANGES):
            spent[event.name].append(event.time_range.elapsed_us() / 1e6)
    lines = (
        ProfileRow(name=name, seconds=sum(taken) / steps, calls=len(taken) / steps) for name, taken in spent.items()
    )
    return tuple(sorted(lines, key=lambda line: -line.seconds))
