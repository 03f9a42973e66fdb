"""The machine's clock."""

from __future__ import annotations

import asyncio
import time


def boot_s() -> float:
    """Return seconds since this machine started, with those in which it slept; all of its processes see the same."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SystemClock:
    """Wall and steady time of this machine (``polyreme_api.clock.Clock``)."""

    def now_s(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()

    def steady_s(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        await asyncio.sleep(delay_s)
