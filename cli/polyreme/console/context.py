"""State that the pages of one console share."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol, TypeVar

from aiohttp import web

from polyreme.console import markup
from polyreme.console.guard import Guard
from polyreme.console.run_source import RunSource

S = TypeVar("S")


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
    streams: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Live parts that are open, by session."""

    def source(self, request: web.Request) -> RunSource:
        """Return the runs, as the user may see them who asks."""
        return self.backend.source(request)

    def source_as(self, request: web.Request, kind: type[S]) -> S:
        """Return the runs of a console whose pages need one kind of source.

        Raises:
            TypeError: If it shows another one.
        """
        source = self.source(request)
        if not isinstance(source, kind):
            raise TypeError(f"the console shows {type(source).__name__}, and pages of {kind.__name__}")
        return source

    def page(self, title: str, body: str, *, current: str = "", status: int = 200) -> web.Response:
        """Answer with a page."""
        return markup.html(markup.page(title, body, navigation=self.navigation, current=current), status=status)
