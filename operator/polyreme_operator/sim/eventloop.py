"""An event loop whose time passes only when nobody has anything to do: hours in milliseconds, every time the same."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable, Iterable
from typing import Any, TypeVarTuple

from polyreme_api.errors import PolyremeError

_Ts = TypeVarTuple("_Ts")

TURNS_MAX = 20_000
"""Turns of the loop at one moment; what a simulation has to do at one moment takes a few hundred."""
EPOCH_S = 1_700_000_000.0
"""Wall time at which simulations begin."""


class Process:
    """A process of the simulated world, as SIGSTOP sees it: while it is stopped, none of its code runs.

    What runs belongs to a process by its context: tasks and callbacks take it from whoever made them.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._parked: list[asyncio.Handle] = []

    def context(self) -> contextvars.Context:
        """Return a context in which tasks of this process are made."""
        context = contextvars.Context()
        context.run(_PROCESS.set, self)
        return context

    def holds(self, handle: asyncio.Handle) -> bool:
        """Keep what would run until the process goes on, if it is stopped."""
        if self.stopped:
            self._parked.append(handle)
        return self.stopped

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self, loop: VirtualLoop) -> None:
        """SIGCONT: what should have run meanwhile runs now, late, in the order in which it came."""
        self.stopped = False
        parked, self._parked = self._parked, []
        loop.run_next(parked)


_PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class _Handle(asyncio.Handle):
    """A callback, and the process whose it is."""

    __slots__ = ("process",)

    process: Process | None

    def _run(self) -> None:
        if self.process is None or not self.process.holds(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    """A timer, and the process whose it is."""

    __slots__ = ("process",)

    process: Process | None

    def enter(self, scheduled: list[asyncio.TimerHandle]) -> None:
        """Join the loop's timers."""
        heapq.heappush(scheduled, self)
        self._scheduled = True

    def _run(self) -> None:
        if self.process is None or not self.process.holds(self):
            super()._run()


class SimStalledError(PolyremeError):
    """The simulated world would wait for ever, or turn for ever while no time passes."""


class _NoSelector:
    """Waits for nothing but time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._turns = 0
        """Turns of the loop since time passed."""

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time pass that the loop would have slept."""
        if timeout is None:
            raise SimStalledError("nothing is ready and no timer is set")
        before_s = self._loop.time()
        self._loop.advance(timeout)
        self._turns = self._turns + 1 if self._loop.time() == before_s else 0
        if self._turns > TURNS_MAX:
            raise SimStalledError(
                f"somebody is busy without end at {before_s:.3f} s: {TURNS_MAX} turns, and no time passes"
            )
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """``asyncio.BaseEventLoop`` over a selector that only lets time pass."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._selector = _NoSelector(self)

    def time(self) -> float:
        """Return virtual seconds since the loop's beginning."""
        return self._now_s

    def advance(self, delay_s: float) -> None:
        """Let time pass, to the next timer exactly: sums of small differences must not miss it."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if delay_s > 0 and scheduled:
            self._now_s = max(self._now_s, min(self._now_s + delay_s, scheduled[0].when()))

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback next, in its process."""
        context = contextvars.copy_context() if context is None else context
        handle = _Handle(callback, args, self, context)
        handle.process = context.get(_PROCESS)
        self.run_next((handle,))
        return handle

    def run_next(self, handles: Iterable[asyncio.Handle]) -> None:
        """Put callbacks behind those that are ready."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback at a time, in its process."""
        context = contextvars.copy_context() if context is None else context
        timer = _TimerHandle(when, callback, args, self, context)
        timer.process = context.get(_PROCESS)
        timer.enter(self._scheduled)  # type: ignore[attr-defined]
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback after a delay, in its process."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        """No files, no events."""

    def _write_to_self(self) -> None:
        """No other thread ever wakes this loop."""


class SimClock:
    """The loop's time as a ``Clock``."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        """Return simulated wall time."""
        return EPOCH_S + self._loop.time()

    def steady_s(self) -> float:
        """Return simulated steady time."""
        return self._loop.time()

    async def sleep(self, delay_s: float) -> None:
        """Wait in simulated time."""
        await asyncio.sleep(delay_s)
