"""The device of a rank: check that it is what the plan was made for, and recognise out-of-memory errors."""

from __future__ import annotations

import torch

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.hardware import GIB, PROCESSOR, hardware_named
from polyreme_trainer.parallel.causes import causes

_CPU_IS_FULL = "can't allocate memory"
"""Text of an out-of-memory error of torch's CPU allocator, which has no type of its own."""


def take_device(hardware: str, *, local_rank: int, tf32: bool = False) -> str:
    """Take this rank's device, of the kind that the plan was made for, and return its type for torch.

    Args:
        hardware: Kind of device (``polyreme_planner.hardware``).
        local_rank: This rank among those of its pod.
        tf32: Whether float32 products round their inputs to TF32.

    Raises:
        InvalidConfigError: If this rank has no such device; the message names the device it has.
    """
    wanted = hardware_named(hardware)
    if wanted.name == PROCESSOR:
        return "cpu"
    needs = f"plan was made for other hardware: {wanted.name} ({wanted.memory_bytes / GIB:.0f} GiB)"
    field = "spec.workers.hardware"
    if not torch.cuda.is_available():
        raise InvalidConfigError(f"{needs}, this rank has only a CPU", field=field)
    if local_rank >= torch.cuda.device_count():
        raise InvalidConfigError(
            f"{needs}, and local rank {local_rank} has none of its own: {torch.cuda.device_count()} seen", field=field
        )
    seen = torch.cuda.get_device_properties(local_rank)
    if wanted.device_name not in seen.name or seen.total_memory < wanted.usable_bytes:
        raise InvalidConfigError(f"{needs}, this rank has {seen.name} ({seen.total_memory / GIB:.0f} GiB)", field=field)
    torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    return "cuda"


def full_memory(error: BaseException) -> str | None:
    """Return the allocator's message if an error means that a device's or the host's memory is full, else None."""
    for each in causes(error):
        text = " ".join(str(each).split())
        if isinstance(each, (torch.OutOfMemoryError, MemoryError)) or _CPU_IS_FULL in text:
            return text.partition(" If reserved but unallocated")[0] or type(each).__name__
    return None
