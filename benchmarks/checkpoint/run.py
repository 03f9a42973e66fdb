"""Cost of a checkpoint to the steps of two ranks with 108 MB of state each: ours against torch's own ways to save.

Usage: run.py [--runs 3] [--folder FOLDER]
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from polyreme_api.commit_marker import CommitMarker
from polyreme_api.progress import CheckpointRef
from polyreme_datahub.objects import open_store
from polyreme_launcher.shared_copies import CopyFiles
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.checkpoint.content import Content, FlatTensors
from polyreme_trainer.checkpoint.host_copy import HostCopies
from polyreme_trainer.checkpoint.load import load_checkpoint, read_marker
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.checkpoint.save import AfterStep, CheckpointWriter, Identity
from polyreme_trainer.checkpoint.shards import ShardAxis, TensorShard
from polyreme_trainer.model.sharding import Cut
from polyreme_trainer.parallel.flat_layout import Slot
from polyreme_trainer.parallel.world import RankSettings, World, open_world

RANKS = 2
STEPS, EVERY_STEPS = 20, 5
PRODUCTS = 60
"""Products of a step: the same work in every run, some 0.3 s of a processor."""
TENSORS, ROWS, COLUMNS = 36, 512, 488
"""Tensors of each of the three buffers (values and two moments) and the size of a rank's slice: 36 MB a buffer."""
BARS = {"stall_ratio_dcp_save": 10.0}
LOADS = 3
WAIT_S_MAX = 300.0


class Ran(NamedTuple):
    """What one rank measured."""

    total_s: float
    """All steps, until the last checkpoint is durable."""
    stalls_s: list[float]
    """How long each save held the step up."""
    save_s: float
    """From the call to durable, the last one, with nothing else to do."""
    processor_s: float
    """What all threads of the rank used of a processor, until the last checkpoint is durable."""


Save = Callable[[int], None]


def main() -> int:
    """Measure and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Where to save; a disk, not memory.")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder))
    try:
        # Modes take turns, so that what else the machine does falls on all of them.
        runs = [(mode, gang(mode, folder)) for _ in range(options.runs) for mode in MODES]
        figures = summarise({mode: [ran for of, rans in runs if of == mode for ran in rans] for mode in MODES})
        figures |= {name: round(value, 3) for name, value in gang("load", folder)[0].items()}
    finally:
        shutil.rmtree(folder)
    ok = all(figures[name] >= bar for name, bar in BARS.items())
    print(json.dumps({"name": "bench-checkpoint", "figures": figures, "bar": BARS, "ok": ok}))
    return 0 if ok else 1


def summarise(runs: dict[str, list[Ran]]) -> dict[str, float]:
    """Medians over ranks and runs; ratios of torch's to ours."""
    middle = {mode: statistics.median(ran.total_s for ran in rans) for mode, rans in runs.items()}
    processor = {mode: statistics.median(ran.processor_s for ran in rans) for mode, rans in runs.items()}
    added = {mode: middle[mode] - middle["none"] for mode in MODES if mode != "none"}
    stall = {mode: statistics.median(stall_s for ran in runs[mode] for stall_s in ran.stalls_s) for mode in added}
    figures: dict[str, float] = {
        "megabytes_per_rank": 3 * TENSORS * ROWS * COLUMNS * 4 / 1e6,
        "steps_s": middle["none"],
    }
    for mode, added_s in added.items():
        figures |= {f"stall_{mode}_ms": 1e3 * stall[mode], f"added_{mode}_s": added_s}
        figures[f"save_{mode}_s"] = statistics.median(ran.save_s for ran in runs[mode])
        figures[f"processor_{mode}_s"] = processor[mode] - processor["none"]
        if mode != "ours":
            figures[f"stall_ratio_{mode}"] = stall[mode] / stall["ours"]
            figures[f"added_ratio_{mode}"] = added_s / max(added["ours"], 1e-3)
    figures["stall_ours_first_ms"] = 1e3 * statistics.median(ran.stalls_s[0] for ran in runs["ours"])
    return {name: round(value, 3) for name, value in figures.items()}


def gang(mode: str, folder: Path) -> list[Any]:
    """Run both ranks of a mode in fresh processes; return what they measured."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listener, context.Manager() as manager:
        reports = manager.dict()
        ranks = [context.Process(target=be_rank, args=(mode, rank, folder, listener, reports)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(WAIT_S_MAX)
        if len(reports) < RANKS:
            raise SystemExit(f"{mode}: {RANKS - len(reports)} ranks did not get to the end")
        print(f"{mode}: {reports[0]}", file=sys.stderr)
        return [reports[rank] for rank in range(RANKS)]


def be_rank(mode: str, rank: int, folder: Path, listener: socket.socket, reports: Any) -> None:
    """Be one rank: train, and save by the mode; or load what was saved."""
    torch.set_num_threads(1)
    settings = RankSettings(
        rank=rank,
        world=RANKS,
        attempt=1,
        master_port=listener.getsockname()[1],
        master_fd=os.dup(listener.fileno()) if rank == 0 else None,
    )
    root = folder / mode
    if rank == 0 and mode != "load":
        shutil.rmtree(root, ignore_errors=True)
    with open_world(settings, Layout(dp=RANKS)) as world:
        reports[rank] = measure_loads(folder, rank, world) if mode == "load" else MODES[mode](root, rank, world)


def make_content(rank: int, parts: int = RANKS) -> Content:
    """State of a rank: parameters and two moments in flat buffers, slices of tensors that all ranks share."""
    rows = ROWS * RANKS // parts
    slots = [Slot(name=f"layer.{n}", start=n * rows * COLUMNS, shape=(rows, COLUMNS)) for n in range(TENSORS)]
    generator = torch.Generator().manual_seed(rank)
    buffers = {
        prefix: torch.rand(TENSORS * rows * COLUMNS, generator=generator)
        for prefix in ("model", "optimizer.first", "optimizer.second")
    }
    axes = (ShardAxis("tensor", Cut(dim=0), rank, parts),)
    shards = [TensorShard(name=slot.name, axes=axes) for slot in slots]
    flat = [FlatTensors(prefix=p, shards=shards, slots=slots, buffer=buffer) for p, buffer in buffers.items()]
    return Content(flat=flat, plain={f"rng.{rank}": torch.get_rng_state()})


def train(save: Save, wait: Callable[[], None], content: Content, world: World) -> Ran:
    """Take the steps, save every few of them, and wait for the last save."""
    square = torch.rand(512, 512)
    step(square, content, world)
    dist.barrier(world.meshes.control_group)
    stalls_s: list[float] = []
    begun_s, begun_processor_s = time.perf_counter(), time.process_time()
    for number in range(1, STEPS + 1):
        step(square, content, world)
        if number % EVERY_STEPS == 0:
            called_s = time.perf_counter()
            save(number)
            stalls_s.append(time.perf_counter() - called_s)
    wait()
    total_s, processor_s = time.perf_counter() - begun_s, time.process_time() - begun_processor_s
    dist.barrier(world.meshes.control_group)
    begun_s = time.perf_counter()
    save(STEPS + 1)
    wait()
    return Ran(total_s, stalls_s, time.perf_counter() - begun_s, processor_s)


def step(square: Tensor, content: Content, world: World) -> None:
    """Products, one all-reduce as at a step's end, and a change of every number that is saved."""
    for _ in range(PRODUCTS):
        square = square @ square
        square /= square.abs().max()
    dist.all_reduce(torch.ones(1 << 18), group=world.meshes.world_group)
    for part in content.flat:
        part.buffer.mul_(0.999)


def with_none(_root: Path, rank: int, world: World) -> Ran:
    """Save nothing."""
    return train(lambda _: None, lambda: None, make_content(rank), world)


def with_ours(root: Path, rank: int, world: World) -> Ran:
    """Save as ranks do: in the background, checksums, marker, retention, a copy in memory."""
    content = make_content(rank)
    store = open_store(root.as_uri())
    done: list[CheckpointRef] = []
    files = CopyFiles().of(rank)
    copies = None if files is None else HostCopies(*files)
    identity = Identity(store=store, attempt=1, shape=KIMI_VL_NANO, plan_hash="bench", rule=Rule(kept=2))
    with CheckpointWriter(
        identity, group=world.meshes.control_group, now_s=time.time, committed=done.append, copies=copies
    ) as writer:
        ran = train(
            lambda number: writer.start(content, step=number, after=AfterStep(loader={})), writer.wait, content, world
        )
    if rank == 0 and len(done) != STEPS // EVERY_STEPS + 1:
        raise SystemExit(f"{len(done)} checkpoints were committed")
    if copies is not None:
        copies.drop()
    return ran


def with_dcp_save(root: Path, rank: int, world: World) -> Ran:
    """Save by ``torch.distributed.checkpoint.save``, with its own files, synced."""
    content = make_content(rank)

    def save(number: int) -> None:
        writer = dcp.FileSystemWriter(_fresh(root, number, rank), sync_files=True)
        dcp.save(content.state_dict(), storage_writer=writer, process_group=world.meshes.control_group)

    return train(save, lambda: None, content, world)


def with_dcp_async(root: Path, rank: int, world: World) -> Ran:
    """Save by ``torch.distributed.checkpoint.async_save`` in a thread, waiting for the save before."""
    content = make_content(rank)
    under_way: list[Any] = []

    def wait() -> None:
        while under_way:
            under_way.pop().result()

    def save(number: int) -> None:
        wait()
        writer = dcp.FileSystemWriter(_fresh(root, number, rank), sync_files=True)
        # Its stager copies plain tensors and DTensors: each rank's slices go by names of their own.
        slices = {
            f"{part.prefix}.{slot.name}.{rank}": part.buffer[slot.start :][: math.prod(slot.shape)].view(slot.shape)
            for part in content.flat
            for slot in part.slots
        }
        named = slices | {f"{name}.{rank}": tensor for name, tensor in content.plain.items()}
        under_way.append(dcp.async_save(named, storage_writer=writer, process_group=world.meshes.control_group))

    return train(save, wait, content, world)


def with_torch_save(root: Path, rank: int, world: World) -> Ran:
    """Save by ``torch.save``, a file a rank, synced."""
    content = make_content(rank)

    def save(number: int) -> None:
        with (_fresh(root, number, rank) / f"rank-{rank}.pt").open("wb") as file:
            torch.save([part.buffer for part in content.flat], file)
            file.flush()
            os.fsync(file.fileno())

    return train(save, lambda: None, content, world)


def _fresh(root: Path, number: int, rank: int) -> Path:
    """A folder for a checkpoint of torch's; the one before goes, as ours do."""
    path = root / str(number)
    if rank == 0:
        shutil.rmtree(root / str(number - 2 * EVERY_STEPS), ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    return path


def measure_loads(folder: Path, rank: int, world: World) -> dict[str, float]:
    """Load what two ranks saved, by the same layout and as one rank's whole, from a disk that nothing has read yet."""
    store = open_store((folder / "ours").as_uri())
    name = f"a000001-s{STEPS + 1:08d}"
    marker = read_marker(store, name)
    files = [*(folder / "ours" / name).iterdir()]

    def ours(content: Content) -> None:
        load_checkpoint(content, marker, store, name, group=world.meshes.control_group)

    figures = {"load_ours_s": _median_load(ours, make_content(rank), files, world)}
    path = folder / "dcp_save" / str(STEPS + 1)

    def theirs(content: Content) -> None:
        reader = dcp.FileSystemReader(path)
        dcp.load(content.state_dict(), storage_reader=reader, process_group=world.meshes.control_group)

    figures["load_dcp_s"] = _median_load(theirs, make_content(rank), [*path.iterdir()], world)
    whole = make_content(0, parts=1)
    whole = Content(flat=whole.flat, plain={})
    figures["reshard_ours_s"] = _median_load(ours, whole, files, world)
    figures["reshard_dcp_s"] = _median_load(theirs, whole, [*path.iterdir()], world)
    figures["restore_from_memory_s"] = _from_memory(rank, marker, world)
    return figures


def _from_memory(rank: int, marker: CommitMarker, world: World) -> float:
    """Take the same from the copy in memory, as ranks do that are forked again in a pod that lives."""
    content = make_content(rank)
    files = CopyFiles().of(rank)
    if files is None:
        raise SystemExit("this machine has no memory for copies")
    copies = HostCopies(*files)
    copies.keep(content, marker)
    taken = _median_load(lambda held: _must(copies.restore(held, marker)), content, [], world)
    copies.drop()
    return taken


def _must(restored: bool) -> None:
    if not restored:
        raise SystemExit("the copy in memory was not taken")


def _median_load(load: Callable[[Content], None], content: Content, files: list[Path], world: World) -> float:
    taken = []
    for _ in range(LOADS):
        for path in files:
            _forget(path)
        dist.barrier(world.meshes.control_group)
        begun_s = time.perf_counter()
        load(content)
        dist.barrier(world.meshes.control_group)
        taken.append(time.perf_counter() - begun_s)
    return statistics.median(taken)


def _forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


MODES: dict[str, Callable[[Path, int, World], Ran]] = {
    "none": with_none,
    "ours": with_ours,
    "dcp_save": with_dcp_save,
    "dcp_async": with_dcp_async,
    "torch_save": with_torch_save,
}


if __name__ == "__main__":
    sys.exit(main())
