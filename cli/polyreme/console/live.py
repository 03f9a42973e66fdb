"""Live parts of pages: a stream of events, each the whole part, sent when it has changed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from polyreme.console.markup import notice
from polyreme.report.svg import safe
from polyreme_api.errors import PolyremeError

if TYPE_CHECKING:
    from polyreme.console.context import Console

POLL_S = 1.0
QUIET_S = 15.0
"""A stream without changes says so often that it is there: a browser that left is noticed then."""
STREAMS_MAX = 64
_open_streams: set[object] = set()


def live_part(path: str, body: str) -> str:
    """Return a part of a page that follows a stream; without scripts it stays as it is."""
    return f'<div data-hx-sse:connect="{safe(path)}" data-hx-swap="innerMorph" data-hx-target="this">{body}</div>'


async def stream(console: Console, request: web.Request, render: Callable[[], str]) -> web.StreamResponse:
    """Send a part whenever it has changed, until the browser leaves or the console stops.

    Args:
        console: The console.
        request: Its Last-Event-ID names what the browser has.
        render: Returns the part; it is called in a thread. Its errors are shown in the part's place.
    """
    if len(_open_streams) >= STREAMS_MAX:
        return web.Response(status=503, text=f"{STREAMS_MAX} pages are open; close some\n")
    mark = object()
    _open_streams.add(mark)
    try:
        return await _send(console, request, render)
    finally:
        _open_streams.discard(mark)


async def _send(console: Console, request: web.Request, render: Callable[[], str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    response.headers["X-Content-Type-Options"] = "nosniff"
    await response.prepare(request)
    last, quiet_s = request.headers.get("Last-Event-ID", ""), 0.0
    with contextlib.suppress(ConnectionError):
        while not console.stopped.is_set():
            part = await console.read(lambda: shown(render))
            digest = hashlib.sha256(part.encode()).hexdigest()[:16]
            if digest != last:
                lines = "".join(f"data: {line}\n" for line in part.split("\n"))
                await response.write(f"id: {digest}\n{lines}\n".encode())
                last, quiet_s = digest, 0.0
            elif quiet_s >= QUIET_S:
                await response.write(b": nothing new\n\n")
                quiet_s = 0.0
            quiet_s += POLL_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(console.stopped.wait(), POLL_S)
    return response


def shown(render: Callable[[], str]) -> str:
    """Return a part, or the sentence of what keeps it from being shown."""
    try:
        return render().replace("\r", "")
    except PolyremeError as error:
        return notice(str(error), "bad")
    except OSError as error:
        return notice(f"files can't be read: {error}", "bad")
