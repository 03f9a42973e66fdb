"""Limits of a server, and the places of its requests. Used from one loop alone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What clients may use."""

    requests: int
    """Requests at once, those that wait included."""
    body_bytes: int
    request_s: float
    """From a request's first byte to the last token of its answer."""
    tokens: int
    """Of a prompt and its answer together."""


class Places:
    """The places of a server."""

    def __init__(self, total: int) -> None:
        self._free = total

    def take(self) -> Place | None:
        """Return a place; None if all are taken."""
        if not self._free:
            return None
        self._free -= 1
        return Place(self)

    def give_back(self) -> None:
        """Take a place back that a request has left."""
        self._free += 1


class Place:
    """A place, held once by its request, and once by each work that outlives it."""

    def __init__(self, places: Places) -> None:
        self._places, self._holders = places, 1

    def keep(self, work: asyncio.Future[Any]) -> None:
        """Hold the place until some work is done, too."""
        self._holders += 1

        def leave(done: asyncio.Future[Any]) -> None:
            self.leave()
            if not done.cancelled():
                done.exception()  # who waited for it may have left

        work.add_done_callback(leave)

    def leave(self) -> None:
        """Hold it once less; the last one gives it back."""
        self._holders -= 1
        if not self._holders:
            self._places.give_back()
