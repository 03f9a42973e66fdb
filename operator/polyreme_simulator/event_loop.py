"""An event loop on virtual time, which passes only when nothing is ready: hours in milliseconds, deterministically."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVarTuple, cast

from polyreme_api.errors import PolyremeError

_Ts = TypeVarTuple("_Ts")

TURNS_MAX = 20_000
"""Turns of the loop at one moment; what a simulation has to do at one moment takes a few hundred."""
EPOCH_S = 1_700_000_000.0
"""Wall time at which simulations begin."""
_RESOLUTION_S = 1e-9
"""Timers that are so near are due together."""
_TIMERS_MIN = 100
_CANCELLED_SHARE = 0.5
"""When there are more timers than these, and more of them than this share are cancelled, all cancelled ones go."""


class Process:
    """A process of the simulated world, as SIGSTOP sees it: while it is stopped, none of its code runs.

    What runs belongs to a process by its context: tasks and callbacks take it from their creator.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._parked: list[asyncio.Handle] = []

    def context(self) -> contextvars.Context:
        """Return a context in which tasks of this process are made."""
        context = contextvars.Context()
        context.run(_PROCESS.set, self)
        return context

    def park(self, handle: asyncio.Handle) -> None:
        """Keep a callback until the process continues."""
        self._parked.append(handle)

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
    """A callback, and the process whose it is. Millions are made: what debugging needs is left out."""

    __slots__ = ("process",)

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: contextvars.Context
    ) -> None:
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self.process: Process | None = context.get(_PROCESS)

    def run(self) -> None:
        """Run, unless it was cancelled; what belongs to a process that is stopped waits for it."""
        if self._cancelled:
            return
        if self.process is not None and self.process.stopped:
            self.process.park(self)
        else:
            self._run()


class _Timer(_Handle):
    """The same for a time."""

    __slots__ = ("_timers", "_when", "waits")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: contextvars.Context,
    ) -> None:
        super().__init__(callback, args, loop, context)
        self._when, self._timers = when, loop.timers
        self.waits = True

    def when(self) -> float:
        """Return the time."""
        return self._when

    def cancel(self) -> None:
        """Don't run."""
        if self.waits and not self._cancelled:
            self._timers.cancelled += 1
        super().cancel()

    def __lt__(self, other: object) -> bool:
        """Of two at one time neither goes first: times are compared before."""
        return False


class _Timers:
    """A heap of timers by time, in the same order as asyncio's own."""

    def __init__(self) -> None:
        self.cancelled = 0
        self._heap: list[tuple[float, _Timer]] = []

    def push(self, when: float, timer: _Timer) -> None:
        """Set one."""
        heapq.heappush(self._heap, (when, timer))

    def tidy(self) -> None:
        """Forget cancelled ones: all of them when they are most, else those that come first."""
        heap = self._heap
        if len(heap) > _TIMERS_MIN and self.cancelled > len(heap) * _CANCELLED_SHARE:
            self._heap = [entry for entry in heap if not entry[1].cancelled()]
            heapq.heapify(self._heap)
            self.cancelled = 0
            return
        while heap and heap[0][1].cancelled():
            heapq.heappop(heap)[1].waits = False
            self.cancelled -= 1

    def next_s(self) -> float | None:
        """Return when the first is due; None if none is set."""
        return self._heap[0][0] if self._heap else None

    def move_due(self, end_s: float, ready: deque[_Handle]) -> None:
        """Append those that are due before a time to what is ready."""
        heap = self._heap
        while heap and heap[0][0] < end_s:
            timer = heapq.heappop(heap)[1]
            timer.waits = False
            ready.append(timer)


class SimStalledError(PolyremeError):
    """The simulated world would wait forever, or loop forever while no time passes."""


class VirtualLoop(asyncio.BaseEventLoop):
    """``asyncio.BaseEventLoop`` that waits for nothing but time, and lets it pass at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._turns = 0
        """Turns since time passed."""
        self.timers = _Timers()
        self._ready: deque[_Handle]
        self._stopping: bool
        self._failure: Exception | None = None
        """The first error that a callback raised."""

    def time(self) -> float:
        """Return virtual seconds since the loop's beginning."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback next, in its process."""
        handle = _Handle(callback, args, self, contextvars.copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback next even if its process is stopped: the interpreter finalizes generators this way."""
        handle = _Handle(callback, args, self, contextvars.copy_context() if context is None else context)
        handle.process = None
        self._ready.append(handle)
        return handle

    def run_next(self, handles: Iterable[asyncio.Handle]) -> None:
        """Queue callbacks after those that are ready."""
        self._ready.extend(handles)  # type: ignore[arg-type]

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback at a time, in its process."""
        context = contextvars.copy_context() if context is None else context
        timer = _Timer(when, callback, args, self, context)
        self.timers.push(when, timer)
        return cast("asyncio.TimerHandle", timer)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback after a delay, in its process."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Advance time if nothing is ready, and run what is ready then."""
        self.timers.tidy()
        if self._ready or self._stopping:
            self._turns += 1
        else:
            self._pass_time()
        if self._turns > TURNS_MAX:
            raise SimStalledError(f"a task never yields at {self._now_s:.3f} s: {TURNS_MAX} turns, and no time passes")
        ready = self._ready
        self.timers.move_due(self._now_s + _RESOLUTION_S, ready)
        for _ in range(len(ready)):
            ready.popleft().run()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the error of a callback, which asyncio would log: an actor that fails must fail the simulation."""
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            self._failure = self._failure or error
        else:
            super().call_exception_handler(context)

    def _pass_time(self) -> None:
        """Go to the next timer exactly: sums of small differences must not miss it."""
        when_s, before_s = self.timers.next_s(), self._now_s
        if when_s is None:
            raise SimStalledError("nothing is ready and no timer is set")
        if when_s > before_s:
            self._now_s = min(before_s + (when_s - before_s), when_s)
        self._turns = self._turns + 1 if self._now_s == before_s else 0

    def _write_to_self(self) -> None:
        """No other thread ever wakes this loop."""


class SimClock:
    """The loop's time as the ``Clock`` of one machine."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._stepped_s = 0.0

    def step_wall(self, by_s: float) -> None:
        """Set the wall clock forward, or back; steady time and waits go on as if nothing had happened."""
        self._stepped_s += by_s

    def now_s(self) -> float:
        """Return simulated wall time."""
        return EPOCH_S + self._stepped_s + self._loop.time()

    def steady_s(self) -> float:
        """Return simulated steady time."""
        return self._loop.time()

    async def sleep(self, delay_s: float) -> None:
        """Wait in simulated time."""
        await asyncio.sleep(delay_s)
