"""Declaration of what the console answers: a page is a module of ``pages`` with its routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from aiohttp import web

if TYPE_CHECKING:
    from polyreme.console.context import Console

Handler = Callable[["Console", web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A method and a path of the console, and what answers them."""

    method: Literal["GET", "POST"]
    path: str
    handle: Handler
    title: str = ""
    """Its entry in the navigation; empty: none."""
    place: int = 0
    """Where that entry is, from the left."""
