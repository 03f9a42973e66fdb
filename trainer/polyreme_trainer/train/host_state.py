"""State in host memory visits the device for its update: copies there, updates and copies back overlap.

    coming    |copy 1|copy 2|      |copy 3|      |copy 4|
    updating         |update 1|update 2|   |update 3|
    going                     |copy 1|copy 2|     |copy 3|

Each row is a queue of its own, whose work runs in order. A visit has one of two buffers; the next visit with the same
buffer comes when this one has gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

BUFFERS = 2
"""Visits that are on the device at a time."""
_ALIGNMENT = 16
"""Numbers to which each tensor of a visit is aligned."""


class Queue(Protocol):
    """Work that runs in the order in which it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Append work."""
        ...

    def mark(self) -> Any:
        """Return a mark of all work so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Run no later work before another queue has reached its mark."""
        ...

    def uses(self, buffer: Tensor) -> None:
        """Keep a buffer's memory, once it is dropped, until all work so far has run."""
        ...

    def settle(self) -> None:
        """Let the host wait for all work so far."""
        ...


class StreamQueue:
    """A stream of the device; by default a new one. ``None`` is that of the step."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @property
    def _own(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()

    def run(self, work: Callable[[], None]) -> None:
        """Launch work on the stream."""
        with torch.cuda.stream(self._own):
            work()

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event: torch.cuda.Event = self._own.record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Let later work wait for an event."""
        self._own.wait_event(mark)

    def uses(self, buffer: Tensor) -> None:
        """Let the allocator wait for the stream before it gives the memory to others."""
        buffer.record_stream(self._own)

    def settle(self) -> None:
        """Wait for the stream."""
        self._own.synchronize()


@dataclasses.dataclass(slots=True)
class _Place:
    buffer: Tensor
    gone: Any = None
    """Mark after the last visit."""


class Visits:
    """Visits of state to one device."""

    def __init__(self, coming: Queue, updating: Queue, going: Queue, *, device: torch.device, length: int) -> None:
        """Visit a device by three queues.

        Args:
            coming: Copies to the device.
            updating: Updates, and whatever else the step does.
            going: Copies back.
            device: Where the updates run.
            length: Numbers of the largest visit.
        """
        self._coming, self._updating, self._going = coming, updating, going
        self._device, self._length = device, length
        self._places: list[_Place] = []
        self._next = 0

    def begin(self) -> None:
        """Allocate the buffers of a step; nothing comes before all that left in the step before is back."""
        self._places = [_Place(torch.empty(self._length, device=self._device)) for _ in range(BUFFERS)]
        self._coming.wait(self._going.mark())
        self._coming.wait(self._updating.mark())  # the buffers' memory may still be in use

    def end(self) -> None:
        """Give the buffers back: forward and backward passes have the memory."""
        for place in self._places:
            self._coming.uses(place.buffer)
            self._going.uses(place.buffer)
        self._places = []

    def update(self, homes: Sequence[Tensor], update: Callable[..., None]) -> None:
        """Bring some tensors to the device, update them there in place, and copy them back.

        Args:
            homes: In host memory, or on the device: these stay where they are.
            update: Gets them, in order, as they are on the device.
        """
        place = self._places[self._next % BUFFERS]
        self._next += 1
        visiting = _within(place.buffer, homes)
        if place.gone is not None:
            self._coming.wait(place.gone)
        self._coming.run(lambda: _copy(homes, visiting))
        self._updating.wait(self._coming.mark())
        self._updating.run(lambda: update(*visiting))
        self._going.wait(self._updating.mark())
        self._going.run(lambda: _copy(visiting, homes))
        place.gone = self._going.mark()

    def settle(self) -> None:
        """Wait until all state is back in host memory."""
        self._going.settle()


def visits_of(device: torch.device, length: int) -> Visits:
    """Return visits to an accelerator, on two streams beside that of the step."""
    coming, going = (StreamQueue(torch.cuda.Stream(device)) for _ in range(2))
    return Visits(coming, StreamQueue(None), going, device=device, length=length)


def visit_length(lengths: Sequence[int]) -> int:
    """Return the numbers of a buffer for tensors of some lengths."""
    return sum(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)


def _within(buffer: Tensor, homes: Sequence[Tensor]) -> list[Tensor]:
    """Return a place in the buffer for each tensor in host memory, and the others themselves."""
    visiting, start = [], 0
    for home in homes:
        if home.device.type == "cpu":
            visiting.append(buffer[start : start + home.numel()])
            start += visit_length([home.numel()])
        else:
            visiting.append(home)
    return visiting


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not target:
            target.copy_(source, non_blocking=True)
