"""An event loop whose time passes only when nobody has anything to do: hours in milliseconds, every time the same."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from polyreme_api.errors import PolyremeError

EPOCH_S = 1_700_000_000.0
"""Wall time at which simulations begin."""


class SimStalledError(PolyremeError):
    """Nothing is ready and no timer is set: the simulated world would wait for ever."""


class _NoSelector:
    """Waits for nothing but time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time pass that the loop would have slept."""
        if timeout is None:
            raise SimStalledError("nothing is ready and no timer is set")
        self._loop.advance(timeout)
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
            self._now_s = max(self._now_s, min(self._now_s + delay_s, heapq.nsmallest(1, scheduled)[0].when()))

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
