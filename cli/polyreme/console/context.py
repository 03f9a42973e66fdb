"""State that the pages of one console share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from aiohttp import web

from polyreme.console import markup
from polyreme.console.guard import Guard
from polyreme.console.run_source import RunSource


class Backend(Protocol):
    """Whose runs a console shows."""

    @property
    def pages(self) -> Sequence[ModuleType]:
        """Packages whose modules declare its pages."""
        ...

    def source(self, request: web.Request) -> RunSource:
        """Return the runs, as the user may see them who asks."""
        ...

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Do what must be done while the console answers."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """A console."""

    backend: Backend
    guard: Guard
    navigation: Sequence[tuple[str, str]]
    stopped: asyncio.Event
    streams: set[object] = dataclasses.field(default_factory=set)
    """Live parts that are open."""

    def source(self, request: web.Request) -> RunSource:
        """Return the runs, as the user may see them who asks."""
        return self.backend.source(request)

    def page(self, title: str, body: str, *, current: str = "", status: int = 200) -> web.Response:
        """Answer with a page."""
        return markup.html(markup.page(title, body, navigation=self.navigation, current=current), status=status)
