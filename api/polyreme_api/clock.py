"""The clock as an argument: decisions take the time, shells own a clock, the simulator owns another."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall time for records, steady time for durations. Wall time may be stepped at any moment, back or forward."""

    def now_s(self) -> float:
        """Return seconds since the Unix epoch."""
        ...

    def steady_s(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds of this clock's time."""
        ...


class MonotonicWallClock:
    """Wall time that follows no step of the machine's clock: wall time at creation, and steady time since.

    Two of its times differ by the time that has passed between them, so they may be subtracted. As a record such a time
    is off by the steps since the clock's creation (``stepped_s``).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.now_s() - clock.steady_s()

    def now_s(self) -> float:
        """Return seconds since the Unix epoch, never less than before."""
        return self._began_s + self._clock.steady_s()

    def steady_s(self) -> float:
        """Return seconds on a clock that never goes back."""
        return self._clock.steady_s()

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds."""
        await self._clock.sleep(delay_s)

    def stepped_s(self) -> float:
        """Return by how much the machine's wall clock has been set forward since this clock was created."""
        return self._clock.now_s() - self.now_s()
