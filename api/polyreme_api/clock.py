"""The clock as an argument: decisions take the time, shells own a clock, the simulator owns another."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall time for records, steady time for durations."""

    def now_s(self) -> float:
        """Return seconds since the Unix epoch."""
        ...

    def steady_s(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait for ``delay_s`` seconds of this clock's time."""
        ...
