"""Live parts of pages: a stream of events, each the whole part, sent when it has changed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from polyreme.console.guard import RefusedRequestError
from polyreme.console.markup import notice
from polyreme.report.svg import safe
from polyreme_api.errors import NotFoundError, PolyremeError

if TYPE_CHECKING:
    from polyreme.console.context import Console

REST, REST_S_MAX = 4.0, 60.0
"""A part that took long is refreshed after so many times as long: a page must not keep a processor busy."""
ALIVE, ALIVE_S = b"event: alive\n\n", 15.0
"""A stream says so often that it is there: a browser that left is noticed then, and ``live.js`` notices silence."""
STREAMS_MAX, STREAMS_EACH_MAX = 256, 32
"""Live parts that are open, of all users and of each: one user can't use up those of all."""
Render = Callable[[], Awaitable[str]]


def live_part(path: str, body: str) -> str:
    """Return a part of a page that follows a stream; without scripts it stays as it is.

    ``live.js`` writes into the line above it, and an answer that is no stream changes nothing.
    """
    return (
        f'<p class="lost" role="status"></p><div data-hx-sse:connect="{safe(path)}" data-hx-swap="innerMorph" '
        f'data-hx-target="this" data-hx-status:4xx="swap:none" data-hx-status:5xx="swap:none">{body}</div>'
    )


async def stream(console: Console, request: web.Request, render: Render) -> web.StreamResponse:
    """Send a part whenever it has changed, until the browser leaves, its token ends or the console stops.

    Args:
        console: The console.
        request: Its Last-Event-ID names what the browser has.
        render: Returns the part. Its errors are shown in the part's place.
    """
    session, streams = console.guard.form_token_of(request), console.streams
    if streams[session] >= STREAMS_EACH_MAX or streams.total() >= STREAMS_MAX:
        words = f"{streams[session]} of your pages and {streams.total()} of all users are open; close some\n"
        return web.Response(status=503, text=words)
    streams[session] += 1
    try:
        return await _send(console, request, render)
    finally:
        streams[session] -= 1
        if not streams[session]:
            del streams[session]


async def _send(console: Console, request: web.Request, render: Render) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    response.headers["X-Content-Type-Options"] = "nosniff"
    clock_s = asyncio.get_running_loop().time
    began_s = clock_s()
    part, is_last = await opened(render), False
    await response.prepare(request)
    last, poll_s = request.headers.get("Last-Event-ID", ""), console.source(request).poll_s
    alive = asyncio.create_task(_say_alive(response))
    try:
        if last:
            await response.write(ALIVE)
        while not (console.stopped.is_set() or alive.done() or request.transport is None):
            digest = hashlib.sha256(part.encode()).hexdigest()[:16]
            if digest != last:
                lines = "".join(f"data: {line}\n" for line in part.split("\n"))
                await response.write(f"id: {digest}\n{lines}\n".encode())
                last = digest
            if is_last:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(console.stopped.wait(), rest_after(clock_s() - began_s, poll_s=poll_s))
            began_s = clock_s()
            part, is_last = await _look(render)
    except ConnectionError:
        pass  # the browser has left
    finally:
        alive.cancel()
    return response


async def _say_alive(response: web.StreamResponse) -> None:
    """Write at a steady pace, also while a part takes long; return when the browser has left."""
    with contextlib.suppress(ConnectionError):
        while True:
            await asyncio.sleep(ALIVE_S)
            await response.write(ALIVE)


def rest_after(took_s: float, *, poll_s: float) -> float:
    """Return how long to wait before a part that took so long is refreshed [s]."""
    return max(poll_s, min(REST_S_MAX, REST * took_s))


async def opened(render: Render) -> str:
    """Return a part of a page that is opened: what is not there, or is not the user's, is refused.

    Raises:
        NotFoundError: As the part raises it.
        RefusedRequestError: As the part raises it, but for a cluster that does not answer: the page waits for that.
    """
    try:
        return (await render()).replace("\r", "")
    except (PolyremeError, OSError) as error:
        refused = isinstance(error, RefusedRequestError) and error.status != web.HTTPServiceUnavailable.status_code
        if refused or isinstance(error, NotFoundError):
            raise
        return _sentence(error)


async def shown(render: Render) -> str:
    """Return a part, or the sentence of what keeps it from being shown."""
    return (await _look(render))[0]


async def _look(render: Render) -> tuple[str, bool]:
    """Return a part or its sentence, and whether it is the last one: only a new request brings another token."""
    try:
        return (await render()).replace("\r", ""), False
    except (PolyremeError, OSError) as error:
        ended = isinstance(error, RefusedRequestError) and error.status == web.HTTPUnauthorized.status_code
        return _sentence(error), ended


def in_words(render: Callable[[], str]) -> str:
    """Return a part that needs no waiting, or the sentence of what keeps it from being shown."""
    try:
        return render()
    except (PolyremeError, OSError) as error:
        return _sentence(error)


def _sentence(error: Exception) -> str:
    words = str(error) if isinstance(error, PolyremeError) else f"files can't be read: {error}"
    return notice(words, "bad")
