"""A rank whose compute is slept and whose exchanges are real: pipeline sends, all-to-alls, all-reduces, on gloo.

Two cores can't show the bubbles of eight busy ranks; ranks that sleep need no core, so that every wait is as long as it
would be. Each way to train has ranks of its own, and the first of them answers.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from polyreme_planner.costs import BACKWARD_PRODUCTS, Setting, attention_core_s, part_exchanges, products_s
from polyreme_planner.hardware import Pattern
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, all_parts, layer_parts, part_parameters
from polyreme_planner.schedules import Kind, Schedule, Slot, Work, ranks_of_stages, table
from polyreme_planner.search import Estimate
from polyreme_planner.traffic import Exchange
from polyreme_trainer.parallel.collectives import exchange_rows, pass_on, sum_over
from polyreme_trainer.parallel.communicators import Communicators, Operation, Wanted
from polyreme_trainer.parallel.mesh import Meshes, dense_place, group_ranks, open_meshes

CALIBRATIONS = 30
TIMEOUT_S = 300.0


def job_of(setting: Setting, estimate: Estimate, steps: int) -> dict[str, Any]:
    """Describe what ranks do in a step: times to sleep by stage and kind, bytes to exchange, orders of work."""
    of = estimate.candidate
    products = products_s(setting, of.layout, packs=of.microbatch_packs)
    moved = part_exchanges(setting, of.layout, packs=of.microbatch_packs)
    core_s = attention_core_s(setting, of.layout, packs=of.microbatch_packs)
    parts = stage_parts(setting, estimate.split)
    parameters = part_parameters(setting.shape)
    whole = all_parts(setting.shape)
    tokens = of.microbatch_packs * setting.mix.sequence_tokens / (of.layout.cp * of.layout.tp)
    return {
        "layout": {name: getattr(of.layout, name) for name in ("dp", "ep", "pp", "cp", "tp", "ulysses")},
        "schedule": of.schedule,
        "microbatches": of.microbatches,
        "chunks": of.chunks,
        "steps": steps,
        "sleep_s": [{kind: sum(products[part].of(kind) for part in stage) for kind in Kind} for stage in parts],
        "exchanges": [{way: messages(stage, moved, way) for way in ("forward", "backward")} for stage in parts],
        # A ring's keys, values and their gradients travel while attention computes.
        "behind": [{way: turns(stage, moved, way) for way in ("forward", "backward")} for stage in parts],
        "core_s": [
            {"forward": count * core_s, "backward": BACKWARD_PRODUCTS * count * core_s}
            for count in (sum(part in {Part.DENSE, Part.MOE} for part in stage) for stage in parts)
        ],
        "stream_bytes": tokens * setting.shape.decoder.width * setting.numerics.activation_bytes,
        "common_bytes": 4 * sum(parameters[part].common for part in whole) / of.layout.tp / of.layout.pp,
        "routed_bytes": 4 * sum(parameters[part].routed for part in whole) / of.layout.ep / of.layout.pp,
    }


def messages(stage: list[Part], moved: dict[Part, tuple[Exchange, ...]], way: str) -> list[tuple[str, bool, float]]:
    """List what a rank sends and waits for: axis, whether to the next rank only, bytes."""
    found = []
    for one in itertools.chain.from_iterable(moved[part] for part in stage):
        sent = one.forward if way == "forward" else one.backward
        each = sent.sent_bytes / max(1, sent.messages)
        found += [(one.axis, one.pattern is Pattern.RING, each)] * sent.messages
    return found


def turns(stage: list[Part], moved: dict[Part, tuple[Exchange, ...]], way: str) -> list[float]:
    """List the bytes of each message that a ring sends while attention computes."""
    found = []
    for one in itertools.chain.from_iterable(moved[part] for part in stage):
        sent = one.forward if way == "forward" else one.backward
        found += [sent.overlapped_bytes / max(1, sent.overlapped_messages)] * sent.overlapped_messages
    return found


def stage_parts(setting: Setting, split: tuple[int, ...]) -> list[list[Part]]:
    """Name the parts of each stage."""
    layers = layer_parts(setting.shape)
    ends = list(itertools.accumulate(split, initial=0))
    stages = [list(layers[begin:end]) for begin, end in itertools.pairwise(ends)]
    stages[0] = [Part.TOWER, Part.EMBEDDING, *stages[0]]
    stages[-1].append(Part.HEAD)
    return stages


def be_rank(rank: int, ranks: int, port: int, path: Path, work: Callable[[int], dict[str, float]]) -> None:
    """Meet the others, do the work, let the first rank write the answer, and clean up."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    answer = work(rank)
    if rank == 0:
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(answer))
        beside.rename(path)  # whole or not at all
    dist.barrier()
    dist.destroy_process_group()


def measured(job: dict[str, Any], rank: int) -> dict[str, float]:
    """Run the steps of a job."""
    return Step(job, rank).measured()


def calibrated(megabytes: tuple[float, float], _: int) -> dict[str, float]:
    """Fit latency and rate of an all-to-all, in groups of two and four, ranks asleep in between as in a step."""
    took: dict[float, list[float]] = {}
    for layout in (Layout(dp=4, cp=2), Layout(dp=2, cp=4)):
        group = open_meshes(layout, Communicators(timeout_s=TIMEOUT_S)).shard_group
        for size in megabytes:
            for _ in range(CALIBRATIONS):
                time.sleep(0.005)
                begin_s = time.perf_counter()
                all_to_all(size * 1e6, group)
                took.setdefault(size, []).append(time.perf_counter() - begin_s)
    small, large = megabytes
    small_s, large_s = statistics.median(took[small]), statistics.median(took[large])
    rate = (large - small) * 1e6 / max(large_s - small_s, 1e-6)
    return {"latency_s": max(small_s - small * 1e6 / rate, 1e-5), "bytes_per_s": rate}


def all_to_all(sent_bytes: float, group: dist.ProcessGroup) -> None:
    """Send so many bytes to the others of the group, evenly."""
    ranks = dist.get_world_size(group)
    rows = max(1, round(sent_bytes / 4 / (ranks - 1)))
    counts = [rows] * ranks
    exchange_rows(torch.zeros(rows * ranks, 1), sent=counts, received=counts, group=group)


class Step:
    """One rank's part of a step."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self._job = job
        self._layout = Layout(**job["layout"])
        self._meshes: Meshes = open_meshes(self._layout, Communicators(timeout_s=TIMEOUT_S))
        cp = Wanted(name="cp", ranks=group_ranks(self._layout, rank, ("cp",)), operations=frozenset({Operation.ROWS}))
        self._groups = {
            "tp": self._meshes.tp_group,
            **self._meshes.communicators.open([cp]),
            "ep": self._meshes.ep_group,
        }
        self._place = dense_place(self._layout, rank)["pp"]
        self._line = group_ranks(self._layout, rank, ("pp",))
        self._sending: list[Any] = []
        self._stream = torch.zeros(max(1, round(job["stream_bytes"] / 4)))
        schedule = job["schedule"]
        self._rank_of: tuple[int, ...] = (0,)
        self._slots: list[Slot]
        if schedule is None:
            numbers = range(job["microbatches"])
            self._slots = [(Work(kind, 0, number),) for number in numbers for kind in (Kind.FORWARD, Kind.BACKWARD)]
        else:
            self._slots = list(
                table(
                    Schedule(schedule), ranks=self._layout.pp, microbatches=job["microbatches"], chunks=job["chunks"]
                )[self._place]
            )
            self._rank_of = ranks_of_stages(Schedule(schedule), self._layout.pp, job["chunks"])

    def measured(self) -> dict[str, float]:
        """Run steps and take the median of all but the first."""
        took = []
        for _ in range(self._job["steps"] + 1):
            dist.barrier()
            begin_s = time.perf_counter()
            self._run()
            dist.barrier()
            took.append(time.perf_counter() - begin_s)
        return {"step_s": statistics.median(took[1:])}

    def _run(self) -> None:
        for slot in self._slots:
            for work in slot:
                self._receive(work)
            for work in slot:
                self._compute(work)
            for work in slot:
                self._send(work)
        for handle, _ in self._sending:
            handle.wait()
        self._sending.clear()
        sum_over(torch.zeros(round(self._job["common_bytes"] / 4)), self._meshes.replica_group)
        sum_over(torch.zeros(round(self._job["routed_bytes"] / 4)), self._meshes.edp_group)

    def _compute(self, work: Work) -> None:
        time_s = self._job["sleep_s"][work.stage][work.kind]
        if work.kind is Kind.WEIGHT:
            time.sleep(time_s)
            return
        way = "forward" if work.kind is Kind.FORWARD else "backward"
        overlapped = self._job["behind"][work.stage][way]
        core_s = min(time_s, self._job["core_s"][work.stage][way])
        for at, sent_bytes in enumerate(overlapped):
            wait = self._turn(sent_bytes, tag=at)
            time.sleep(core_s / len(overlapped))
            wait()
        time.sleep(time_s - core_s if overlapped else time_s)
        for axis, to_next, sent_bytes in self._job["exchanges"][work.stage][way]:
            if to_next:
                self._turn(sent_bytes, tag=len(overlapped))()
            else:
                all_to_all(sent_bytes, self._groups[axis])

    def _turn(self, sent_bytes: float, *, tag: int) -> Callable[[], None]:
        """Begin to pass so many bytes on around the context-parallel group."""
        sent = torch.zeros(max(1, round(sent_bytes / 4)))
        return pass_on(sent, torch.empty_like(sent), self._groups["cp"], tag=tag)

    def _receive(self, work: Work) -> None:
        source = self._neighbour(work, -1)
        if source is not None:
            dist.recv(torch.empty_like(self._stream), src=self._line[source], tag=self._tag(work, work.stage))

    def _send(self, work: Work) -> None:
        target = self._neighbour(work, 1)
        if target is not None:
            step = 1 if work.kind is Kind.FORWARD else -1
            sent = self._stream.clone()
            tag = self._tag(work, work.stage + step)
            self._sending.append((dist.isend(sent, dst=self._line[target], tag=tag), sent))

    def _neighbour(self, work: Work, direction: int) -> int | None:
        """Pipeline rank of the stage before (-1) or after (1) in the direction of this work; None if it is ours."""
        if work.kind is Kind.WEIGHT:
            return None
        stage = work.stage + (direction if work.kind is Kind.FORWARD else -direction)
        if not 0 <= stage < len(self._rank_of) or self._rank_of[stage] == self._place:
            return None
        return self._rank_of[stage]

    def _tag(self, work: Work, stage: int) -> int:
        """Name a message by way, microbatch and the stage that it is for."""
        forward = work.kind is Kind.FORWARD
        return (work.microbatch * len(self._rank_of) + stage) * 2 + forward
