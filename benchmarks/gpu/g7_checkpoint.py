"""G7: how long a checkpoint stalls a step: our staging, pinned or not, and torch's; same bytes and disk.

Ours is the copy to host memory that the device's own stream makes: until it is done, the next step's work waits.
``dcp.save`` writes before it returns, ``dcp.async_save`` copies, then writes in a thread.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from benchmarks.gpu.harness import Place, attempt, attempt_peer, judged, run_alone
from benchmarks.gpu.ours import Trainer, made_up, trainer
from benchmarks.gpu.shapes import base, cut
from torch import Tensor

from polyreme_planner.flops import Mix
from polyreme_planner.hardware import GIB
from polyreme_trainer.checkpoint.staging import Staging
from polyreme_trainer.train.checkpoint_content import content

BAR = {"dcp_save_over_ours_ratio": 10.0}
HOST_BYTES_PER_S = 55e9
"""Of PCIe 5 with sixteen lanes, one direction, as reached: 63 GB/s by the standard, less what packets take."""
RUNS = 5
"""After one that allocates: an attempt allocates once."""
WORDS = 8192
"""Words of a model that is small enough for the host's memory and a temporary folder: 0.7 billion parameters."""


def bench(place: Place) -> tuple[dict[str, Any], dict[str, float], bool]:
    """Train a step, so that all state is there; then stage and save."""
    moe = 1
    shape = cut(base(place), base(place).decoder.dense_layers + moe, sees=False, vocabulary=WORDS)
    figures: dict[str, Any] = {"async_process_skipped": "its child would re-import the benchmark: THREAD is compared"}
    with trainer(shape, place) as training, tempfile.TemporaryDirectory() as folder:
        inputs = made_up(shape, Mix(sequence_tokens=64, visual_share=0), place, packs=1)
        training.step(inputs)
        given = content(training.state, training.world.meshes)
        size = sum(buffer.nbytes for buffer in given.buffers())
        figures["bytes_gib"] = round(size / GIB, 3)
        figures["floor_ms"] = round(1e3 * size / HOST_BYTES_PER_S, 3)
        runs: dict[str, Callable[[], float]] = {
            "ours_pinned": stager(training, Staging(), place),
            "ours_unpinned": stager(training, Staging(allocate=unpinned), place),
            "dcp_save": saver(training, Path(folder), place, wait=True),
            "dcp_async_thread": saver(training, Path(folder), place, wait=False),
        }
        for name, run in runs.items():

            def stall(name: str = name, run: Callable[[], float] = run) -> dict[str, Any]:
                run()
                return {f"{name}_stall_ms": round(1e3 * statistics.median(run() for _ in range(runs_of(place))), 3)}

            (attempt(figures, name, stall) if "ours" in name else attempt_peer(figures, name, place, stall))
    if "dcp_save_stall_ms" in figures and "ours_pinned_stall_ms" in figures:
        ratio = figures["dcp_save_stall_ms"] / figures["ours_pinned_stall_ms"]
        figures["dcp_save_over_ours_ratio"] = round(ratio, 2)
    bar = {} if place.ours_only else BAR
    return figures, bar, judged(figures, bar, place) and "ours_pinned_stall_ms" in figures


def runs_of(place: Place) -> int:
    """How often each is timed."""
    return 2 if place.rehearsal else RUNS


def unpinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Host memory as it comes."""
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


def stager(training: Trainer, staging: Staging, place: Place) -> Callable[[], float]:
    """Seconds until the copy is there: the work that precedes the next step's on the device's stream."""

    def run() -> float:
        waited(place)
        begun_s = time.perf_counter()
        staging.stage(content(training.state, training.world.meshes)).wait()
        return time.perf_counter() - begun_s

    return run


def saver(training: Trainer, folder: Path, place: Place, *, wait: bool) -> Callable[[], float]:
    """Seconds until torch's own save gives back control; what it wrote is removed."""

    def run() -> float:
        given = content(training.state, training.world.meshes)
        tensors = {str(number): buffer for number, buffer in enumerate(given.buffers())}
        target = folder / "saved"
        waited(place)
        begun_s = time.perf_counter()
        if wait:
            dcp.save(tensors, checkpoint_id=str(target))
            took_s = time.perf_counter() - begun_s
        else:
            future: Any = dcp.async_save(
                tensors, checkpoint_id=str(target), process_group=training.world.meshes.control_group
            )
            took_s = time.perf_counter() - begun_s
            future.result()
        shutil.rmtree(target)
        return took_s

    return run


def waited(place: Place) -> None:
    """Let the device end what it has."""
    if not place.rehearsal:
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(run_alone("g7", bench, __doc__))
