"""A few steps of a job's model under the profiler: time by layer, time by exchange, and a trace to look at.

The data are synthetic, so neither pipeline nor store is needed; the step is the trainer's own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from polyreme_api.batch import PackedBatch
from polyreme_api.clock import Clock
from polyreme_planner.flops import Mix
from polyreme_trainer.parallel.collectives import largest_number
from polyreme_trainer.parallel.mesh import Meshes, dense_place
from polyreme_trainer.parallel.world import open_world
from polyreme_trainer.profile.spans import Spans, steady, watched
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.profile.timeline import Recorded, exposed_us, host_waits
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, backward, open_state, reduce, update

WARM_UP = 1
"""Warm-up steps, before the measured ones."""
MEASURED = "measured steps"
"""Name of what is measured, in the trace."""
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
    exposed_s: float
    """Of exchanges, while nothing was computed."""
    host_waits: float
    """Waits of the host for the device; on a processor, reads of values that would wait for one."""
    peak_bytes: int | None
    """Most memory that torch held on the device; None on a processor."""


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
        spans = Spans(clock.steady_s)
        for stage in state.stages.values():
            for name, module in watched(stage):
                spans.watch(name, module)
        batch = synthetic_packs(
            settings.shape,
            mix,
            packs=packs_per_rank // settings.pipeline.microbatches,
            seed=dense_place(settings.layout, world.meshes.rank)["dp"],
        )

        def timed(count: int) -> float:
            """Train steps; seconds of each, the device's included."""
            largest_number(0, world.meshes.world_group)  # no rank begins to measure before all are there
            spans.spent.clear()
            waiting_s = steady(clock.steady_s, device)
            with record_function(MEASURED):
                begin_s = waiting_s()
                for _ in range(count):
                    _step(settings, state, world.meshes, batch, spans=spans)
                return (waiting_s() - begin_s) / count

        timed(WARM_UP)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        with profile(activities=activities) as profiler:
            step_s = timed(steps)
        peak_bytes, waited_s = None, step_s
        if device != "cpu":
            peak_bytes = torch.cuda.max_memory_allocated()
            # To time layers, every border waits for the device: not while the step itself is measured.
            spans.now_s = steady(clock.steady_s, device)
            waited_s = timed(steps)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = _recorded(profiler)
    return Profile(
        rank=settings.rank.rank,
        step_s=step_s,
        layers=_layers(spans, steps, waited_s),
        exchanges=_exchanges(events, steps),
        exposed_s=exposed_us(events) / 1e6 / steps,
        host_waits=host_waits(events) / steps,
        peak_bytes=peak_bytes,
    )


def _step(settings: TrainSettings, state: TrainState, meshes: Meshes, batch: PackedBatch, *, spans: Spans) -> None:
    """Train one step; all microbatches are alike."""
    device = settings.rank.device_type
    count = settings.pipeline.microbatches
    microbatches = (
        to_inputs(batch, device=device, media_token=state.media_token, sharing=state.sharing, dtype=state.computes_in)
        for _ in range(count)
    )
    local = backward(state, *microbatches)
    spans.end()
    total = reduce(state, local, meshes)
    update(state, total, settings.optimizer, rate=LEARNING_RATE)


def _layers(spans: Spans, steps: int, step_s: float) -> tuple[ProfileRow, ...]:
    """Return the time of each layer, then that of the rest of the step."""
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
    rest = ProfileRow(name="embedding, head, loss, sums, update, waiting", seconds=max(0.0, rest_s))
    return (*layers, rest)


def _recorded(profiler: profile) -> list[Recorded]:
    """Take what the profiler saw of the steps, without the names that layers and exchanges have on the device."""
    events = profiler.events() or ()
    within = next(event.time_range for event in events if event.name == MEASURED)
    return [
        Recorded(
            name=event.name,
            begin_us=event.time_range.start,
            end_us=event.time_range.end,
            on_device=event.device_type != DeviceType.CPU,
            thread=event.thread,
        )
        for event in events
        if within.start <= event.time_range.start <= within.end
        and not (event.is_user_annotation and event.device_type != DeviceType.CPU)
    ]


def _exchanges(events: Sequence[Recorded], steps: int) -> tuple[ProfileRow, ...]:
    """Sum up the exchanges by name, where a device ran them as kernels as these."""
    spent: dict[str, list[float]] = collections.defaultdict(list)
    on_device = any(event.on_device for event in events)
    for event in events:
        if event.exchanges and event.on_device == on_device:
            spent[event.name].append((event.end_us - event.begin_us) / 1e6)
    lines = (
        ProfileRow(name=name, seconds=sum(taken) / steps, calls=len(taken) / steps) for name, taken in spent.items()
    )
    return tuple(sorted(lines, key=lambda line: -line.seconds))
