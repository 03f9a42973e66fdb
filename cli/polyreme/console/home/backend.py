"""A console of one home: one source for all requests, and an index that is kept up to date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from polyreme.console import pages
from polyreme.console.home import pages as home_pages
from polyreme.console.home.source import HomeSource
from polyreme.run_files.paths import Home
from polyreme_api.clock import Clock

REFRESH_S = 2.0
REFRESH_SHARE = 0.05
"""Part of the time that looks at the home take at most."""
_log = logging.getLogger(__name__)


class HomeBackend:
    """The runs of one home, and the pages that show them.

    Args:
        home: Where the runs are.
        clock: Of this machine.
    """

    pages = (pages, home_pages)

    def __init__(self, home: Home, clock: Clock) -> None:
        self._changed = asyncio.Event()
        self.home = HomeSource(home, clock, on_end=self._changed.set)

    def source(self, request: web.Request) -> HomeSource:
        """Return the runs of the home: the guard knows one user alone."""
        del request
        return self.home

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the index up to date."""
        task = asyncio.create_task(self._refresh())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.home.close()

    async def _refresh(self) -> None:
        while True:
            self._changed.clear()
            try:
                took_s = await asyncio.to_thread(self.home.index.refresh)
            except Exception:  # noqa: BLE001 (the next look may succeed)
                _log.warning("index of runs not refreshed", exc_info=True)
                took_s = 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(REFRESH_S, took_s / REFRESH_SHARE))
