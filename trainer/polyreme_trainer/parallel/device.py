"""The device of a rank: check that it is what the plan was made for, and recognise out-of-memory errors."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_planner.hardware import GIB, PROCESSOR, SHARED_MEMORY_BYTES_MIN, hardware_named
from polyreme_trainer.parallel.causes import causes
from polyreme_trainer.parallel.flash import use_newest_flash

FREE_WAIT_S_MAX, FREE_POLL_S = 30.0, 0.5
"""Longest wait for memory that others still use, and the time between two looks."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory that looks like files, which is the point
_NO_DEVICE = ("Found no NVIDIA driver", "not compiled with CUDA", "No CUDA GPUs are available")
"""Parts of what torch says of a machine without a device."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NEVER = threading.Event()
"""Never set: other processes free the memory."""
_CPU_IS_FULL = "can't allocate memory"
"""Text of an out-of-memory error of torch's CPU allocator, which has no type of its own."""


def take_device(
    hardware: str, *, local_rank: int, tf32: bool = False, pause: Callable[[float], object] = _NEVER.wait
) -> str:
    """Take this rank's device, of the kind that the plan was made for, and return its type for torch.

    Args:
        hardware: Kind of device (``polyreme_planner.hardware``).
        local_rank: This rank among those of its pod.
        tf32: Whether float32 products round their inputs to TF32.
        pause: Waits for so many seconds.

    Raises:
        InvalidConfigError: If this rank has no such device; the message names the device it has.
        EnvironmentFailedError: If the machine's driver or one of its devices fails, or others keep the memory in use.
    """
    wanted = hardware_named(hardware)
    if wanted.name == PROCESSOR:
        return "cpu"
    needs = f"plan was made for other hardware: {wanted.name} ({wanted.memory_bytes / GIB:.0f} GiB)"
    field = "spec.workers.hardware"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split()).partition(". ")[0]
        if any(words in said for words in _NO_DEVICE):
            raise InvalidConfigError(f"{needs}, this rank has only a CPU: {said}", field=field) from error
        raise EnvironmentFailedError(f"CUDA can't be used on this machine: {said}") from error
    _check_seen(local_rank)
    seen = torch.cuda.get_device_properties(local_rank)
    if not wanted.is_called(seen.name) or seen.total_memory < wanted.usable_bytes:
        raise InvalidConfigError(f"{needs}, this rank has {seen.name} ({seen.total_memory / GIB:.0f} GiB)", field=field)
    torch.cuda.set_device(local_rank)
    _wait_for_memory(local_rank, wanted.usable_bytes, pause)
    use_newest_flash((seen.major, seen.minor))
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return "cuda"


def _check_seen(local_rank: int) -> None:
    """Check that this rank has a device of its own."""
    if local_rank < (count := torch.cuda.device_count()):
        return
    lacks = f"local rank {local_rank} has no device of its own: CUDA sees {count}"
    if hidden := os.environ.get(_VISIBLE):
        raise InvalidConfigError(
            f"{lacks}, {_VISIBLE} is {hidden}", field="spec.workers.template or spec.workers.devices"
        )
    raise EnvironmentFailedError(f"{lacks} on this node")


def _wait_for_memory(local_rank: int, needed: int, pause: Callable[[float], object]) -> None:
    """Wait until the memory is free that a plan may fill: of a process that was just killed it is not at once."""
    waited_s = 0.0
    while (free := torch.cuda.mem_get_info(local_rank)[0]) < needed:
        if waited_s >= FREE_WAIT_S_MAX:
            raise EnvironmentFailedError(
                f"memory of device {local_rank} is in use: {free / GIB:.1f} GiB are free after {waited_s:g} s, "
                f"the plan may fill {needed / GIB:.1f} GiB"
            )
        pause(FREE_POLL_S)
        waited_s += FREE_POLL_S


def check_shared_memory(devices: int, folder: Path = SHARED_MEMORY) -> None:
    """Check that ranks of a pod can exchange through shared memory, which NCCL does where devices are not linked.

    Args:
        devices: Ranks of the pod; one alone needs none.
        folder: Where it is mounted.

    Raises:
        InvalidConfigError: If it is too small, as by a container's default of 64 MiB.
    """
    if devices == 1:
        return
    size = shutil.disk_usage(folder).total if folder.is_dir() else 0
    if size < SHARED_MEMORY_BYTES_MIN:
        raise InvalidConfigError(
            f"shared memory is too small for {devices} devices: {folder} has {size >> 20} MiB, at least "
            f"{SHARED_MEMORY_BYTES_MIN >> 20} MiB are needed; mount a memory-backed volume there",
            field="spec.workers.template",
        )


def full_memory(error: BaseException) -> str | None:
    """Return the allocator's message if an error means that a device's or the host's memory is full, else None."""
    for each in causes(error):
        text = " ".join(str(each).split())
        if isinstance(each, (torch.OutOfMemoryError, MemoryError)) or _CPU_IS_FULL in text:
            return text.partition(" If reserved but unallocated")[0] or type(each).__name__
    return None
