"""Timeline of recorded steps: time of exchanges that no computing hides, and waits of the host. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

EXCHANGES = ("gloo:", "nccl")
"""Beginnings of the profiler's names of exchanges: of gloo's on the host, of NCCL's on the host and on the device."""
DEVICE_WAIT = "Synchronize"
"""In the names of the runtime's calls that wait for a device: ``cudaStreamSynchronize``, ``hipEventSynchronize``."""
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations that would wait for a device: what a processor shows of them."""

OPERATION = "aten::"
"""Beginning of the names of torch's operations."""

Interval = tuple[float, float]
"""Begin and end [us]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One event of the profiler."""

    name: str
    begin_us: float
    end_us: float
    on_device: bool
    thread: int = 0
    """Of the host."""

    @property
    def exchanges(self) -> bool:
        """Whether it is an exchange between ranks."""
        return self.name.startswith(EXCHANGES)


def exposed_us(events: Sequence[Recorded]) -> float:
    """Return for how long exchanges ran while nothing was computed.

    On a device kernels are compared with kernels. On a processor an exchange runs on a thread of its own, and torch's
    operations on others hide it: what spans a layer, and calls that start an exchange, may wait for it.
    """
    on_device = any(event.on_device for event in events)
    exchanging = [event for event in events if event.on_device == on_device and event.exchanges]
    computing = [event for event in events if event.on_device == on_device and not event.exchanges]
    if not on_device:
        theirs = {event.thread for event in exchanging}
        computing = [each for each in computing if each.name.startswith(OPERATION) and each.thread not in theirs]
    exchanged = _union(exchanging)
    return sum(end_us - begin_us for begin_us, end_us in exchanged) - _overlap(exchanged, _union(computing))


def host_waits(events: Iterable[Recorded]) -> int:
    """Count the host's waits for a device; without one, the operations that would wait for it."""
    events = list(events)
    if any(event.on_device for event in events):
        return sum(not event.on_device and DEVICE_WAIT in event.name for event in events)
    return sum(event.name in HOST_READS for event in events)


def _union(events: Iterable[Recorded]) -> list[Interval]:
    """Join intervals that overlap; in order."""
    joined: list[Interval] = []
    for begin_us, end_us in sorted((event.begin_us, event.end_us) for event in events):
        if joined and begin_us <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_us))
        else:
            joined.append((begin_us, end_us))
    return joined


def _overlap(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Length of what two unions share."""
    shared_us, at = 0.0, 0
    for begin_us, end_us in some:
        while at < len(others) and others[at][1] <= begin_us:
            at += 1
        beside = at
        while beside < len(others) and others[beside][0] < end_us:
            shared_us += min(end_us, others[beside][1]) - max(begin_us, others[beside][0])
            beside += 1
    return shared_us
