"""State that the pages of one console share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from polyreme.console import markup
from polyreme.console.commands import Commands
from polyreme.console.guard import Guard
from polyreme.console.run_index import RunIndex
from polyreme.console.run_reader import RunReader
from polyreme.run_files.paths import Home
from polyreme_api.clock import Clock

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """A console of one home."""

    home: Home
    clock: Clock
    guard: Guard
    index: RunIndex
    reader: RunReader
    commands: Commands
    threads: ThreadPoolExecutor
    navigation: Sequence[tuple[str, str]]
    stopped: asyncio.Event

    async def read(self, work: Callable[[], T]) -> T:
        """Do work that reads files in a thread, so that others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def page(self, title: str, body: str, *, current: str = "", status: int = 200) -> web.Response:
        """Answer with a page."""
        return markup.html(markup.page(title, body, navigation=self.navigation, current=current), status=status)
