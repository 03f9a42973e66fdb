"""What a recorded step shows, on hand-made events of a device and of a processor."""

from __future__ import annotations

import pytest

from polyreme_trainer.profile.timeline import Recorded, exposed_us, host_waits


def event(name: str, begin_us: float, end_us: float, *, on_device: bool = False, thread: int = 1) -> Recorded:
    return Recorded(name=name, begin_us=begin_us, end_us=end_us, on_device=on_device, thread=thread)


def kernel(name: str, begin_us: float, end_us: float) -> Recorded:
    return event(name, begin_us, end_us, on_device=True)


DEVICE = [
    kernel("gemm", 0, 10),
    kernel("ncclDevKernel_SendRecv", 8, 20),
    kernel("gemm", 15, 17),
    kernel("norm", 16, 18),
    kernel("ncclDevKernel_AllReduce", 19, 24),
    event("nccl:all_reduce", 0, 100),
    event("aten::mm", 0, 100),
    event("cudaStreamSynchronize", 30, 31),
    event("cudaLaunchKernel", 31, 32),
    event("cudaEventSynchronize", 32, 33),
]
"""Exchanges from 8 to 24, beside them kernels until 10 and from 15 to 18."""
PROCESSOR = [
    event("gloo:all_to_all", 0, 10, thread=2),
    event("aten::mm", 4, 6),
    event("aten::add", 5, 7),
    event("layer 1 forward", 0, 20),
    event("c10d::alltoall_", 0, 10),
    event("aten::copy_", 1, 3, thread=2),
    event("aten::_local_scalar_dense", 11, 12),
    event("aten::nonzero", 12, 13),
]


@pytest.mark.parametrize(("events", "exposed", "waits"), [(DEVICE, 11, 2), (PROCESSOR, 7, 2), ([], 0, 0)])
def test_what_a_step_exposes_and_waits_for(events: list[Recorded], exposed: float, waits: int) -> None:
    assert exposed_us(events) == exposed
    assert host_waits(events) == waits
