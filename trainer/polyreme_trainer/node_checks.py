"""Checks of this rank's device and node: matrix product, memory, disk, all-reduce with others. Each returns a rate.

Operands are small integers, so every result is exact in float32 whatever the order of the sums: another result is
wrong, not imprecise. A CPU is shared with other processes, so its arithmetic and memory are measured by this process'
CPU time, and the best try counts; a GPU is measured over all tries, since one that throttles does so under load.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from polyreme_api.clock import Clock
from polyreme_api.errors import RunFailedError

MEGABYTE = 1e6
TRIES_MIN = 3
BUDGET_S = 0.3
"""Least time of a measurement."""
MATRIX_SIZE = {"cpu": 384, "cuda": 8192}
MEMORY_BYTES = {"cpu": 16 << 20, "cuda": 2 << 30}
REDUCED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
REDUCE_TRIES = {"cpu": 10, "cuda": 20}
DISK_BYTES = 16 << 20
LARGEST_FACTOR = 8
"""Largest operand of the matrix product: sums of 8,192 products stay below 2**24."""
PROBES = 4
"""Vectors by which a matrix product is verified: a wrong row escapes each with a chance of at most one half."""
SEED = 20_251_123


class WrongResultError(RunFailedError):
    """A device or a disk returned something else than it must."""


def device_of(local_rank: int) -> torch.device:
    """Return this rank's device: its GPU, or the CPU where there is none."""
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def compute_rate(device: torch.device, clock: Clock, *, disturb: Callable[[torch.Tensor], None] | None = None) -> float:
    """Multiply matrices, verify the product, and return the rate [Gflop/s].

    Args:
        device: Where.
        clock: Clock.
        disturb: Called on each product, to inject a fault.

    Raises:
        WrongResultError: If a product is wrong, or differs from the one before.
    """
    size = MATRIX_SIZE[device.type]
    generator = torch.Generator().manual_seed(SEED)
    left, right = (
        torch.randint(-LARGEST_FACTOR, LARGEST_FACTOR + 1, (size, size), generator=generator).float() for _ in range(2)
    )
    probes = torch.randint(-1, 2, (size, PROBES), generator=generator).double()
    expected = (left.double() @ (right.double() @ probes)).to(device)
    left, right, probes = left.to(device), right.to(device), probes.to(device)

    def multiply() -> torch.Tensor:
        product = left @ right
        if disturb is not None:
            disturb(product)
        return product

    seconds, first, last = _timed(multiply, device, clock)
    for product in (first, last):
        if not torch.equal(product.double() @ probes, expected):
            raise WrongResultError(f"a product of two matrices of {size} x {size} small integers is wrong")
    return 2.0 * size**3 / seconds / 1e9


def memory_rate(device: torch.device, clock: Clock) -> float:
    """Copy a pattern and its complement within memory, compare them, and return the rate [MB/s], reads and writes.

    Raises:
        WrongResultError: If a copy differs.
    """
    size = MEMORY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 8)
    words = max(1, size // 4)
    source = torch.arange(words, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    rates = []
    for pattern in (source, ~source):
        seconds, _, _ = _timed(lambda pattern=pattern: target.copy_(pattern), device, clock)  # type: ignore[misc]
        if not torch.equal(target, pattern):
            raise WrongResultError(f"a copy of {4 * words / MEGABYTE:.0f} MB within memory differs from its source")
        rates.append(8.0 * words / seconds / MEGABYTE)
    return min(rates)


def disk_rate(folder: Path, clock: Clock) -> float:
    """Write a file, read it back from the disk, and return the rate of both [MB/s].

    Raises:
        WrongResultError: If other bytes are read than were written.
        OSError: If the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = secrets.token_bytes(DISK_BYTES)
    with _unnamed_file(folder) as descriptor:
        start_s = clock.steady_s()
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        read = bytearray()
        while part := os.read(descriptor, DISK_BYTES):
            read += part
        seconds = clock.steady_s() - start_s
    if bytes(read) != content:
        raise WrongResultError(f"a file of {DISK_BYTES / MEGABYTE:.0f} MB in {folder} is not read as it was written")
    return 2.0 * DISK_BYTES / max(seconds, 1e-9) / MEGABYTE


def all_reduce_rate(
    device: torch.device, clock: Clock, store: dist.Store, *, rank: int, world: int, timeout_s: float
) -> float:
    """Sum a tensor over a few ranks, verify it, and return bytes over time [MB/s].

    Raises:
        WrongResultError: If a sum is wrong.
        RuntimeError: If a rank is missing, ends, or does not answer in time.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        words = REDUCED_BYTES[device.type] // 4
        pattern = (torch.arange(words, device=device) % 1000).float()
        expected = world * pattern + world * (world - 1) / 2
        best_s, total_s, tries = math.inf, 0.0, REDUCE_TRIES[device.type]
        for number in range(tries + 1):
            value = pattern + rank
            _finish(device)
            start_s = clock.steady_s()
            dist.all_reduce(value)
            _finish(device)
            seconds = clock.steady_s() - start_s
            if not torch.equal(value, expected):
                raise WrongResultError(f"the sum of {words} numbers over {world} ranks is wrong")
            if number > 0:  # the first one opens the connections
                best_s, total_s = min(best_s, seconds), total_s + seconds
        return 4.0 * words / (best_s if device.type == "cpu" else total_s / tries) / MEGABYTE
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _unnamed_file(folder: Path) -> Iterator[int]:
    """Open a file that is gone when this process ends, however it ends."""
    path = folder / f".pre-check-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        yield descriptor
    finally:
        os.close(descriptor)


def _timed(
    act: Callable[[], torch.Tensor], device: torch.device, clock: Clock
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Repeat something; return the seconds of one, with the first and the last result."""
    last = act()
    first = last.clone()
    _finish(device)
    best_s, total_s, tries = math.inf, 0.0, 0
    now_s = time.process_time if device.type == "cpu" else clock.steady_s
    while tries < TRIES_MIN or total_s < BUDGET_S:
        start_s = now_s()
        last = act()
        _finish(device)
        seconds = now_s() - start_s
        best_s, total_s, tries = min(best_s, seconds), total_s + seconds, tries + 1
    return max(best_s if device.type == "cpu" else total_s / tries, 1e-9), first, last


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
