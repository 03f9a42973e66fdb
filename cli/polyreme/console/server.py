"""Server of the console: the routes of all pages and one guard before them, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from polyreme.console import markup, pages
from polyreme.console.assets import asset
from polyreme.console.commands import Commands
from polyreme.console.context import Console
from polyreme.console.guard import START, Guard, RefusedRequestError, harden
from polyreme.console.route import Route
from polyreme.console.run_index import RunIndex
from polyreme.console.run_reader import RunReader
from polyreme.run_files.paths import Home
from polyreme_api.clock import Clock
from polyreme_api.errors import NotFoundError, PolyremeError

BODY_BYTES_MAX = 4 * 2**20
THREADS = 4
REFRESH_S = 2.0
REFRESH_SHARE = 0.05
"""Part of the time that looks at the home take at most."""
_Next = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class ConsoleServer:
    """Answers the browsers of one user.

    Args:
        home: Where the runs are.
        clock: Of this machine.
        on_started: Is called when a start link was used.
    """

    def __init__(self, home: Home, clock: Clock, on_started: Callable[[], object] = lambda: None) -> None:
        self._routes = declared_routes()
        self._changed = asyncio.Event()
        self.guard = Guard(on_started)
        self.console = Console(
            home=home,
            clock=clock,
            guard=self.guard,
            index=RunIndex(home),
            reader=RunReader(clock),
            commands=Commands(home.path, clock, on_end=self._changed.set),
            threads=ThreadPoolExecutor(THREADS, thread_name_prefix="pages"),
            navigation=navigation(self._routes),
            stopped=asyncio.Event(),
        )

    def application(self) -> web.Application:
        """Return the routes."""
        made = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._check])
        made.router.add_get(START, self._start)
        made.router.add_get("/assets/{version}/{name}", self._asset)
        for route in self._routes:
            made.router.add_route(route.method, route.path, functools.partial(route.handle, self.console))
        made.cleanup_ctx.append(self._refreshing)
        made.on_shutdown.append(self._stop)
        return made

    @web.middleware
    async def _check(self, request: web.Request, handler: _Next) -> web.StreamResponse:
        """Refuse what the guard refuses, and turn errors into pages."""
        try:
            await self.guard.check(request)
            response = await handler(request)
        except RefusedRequestError as error:
            response = self._error_page(error.status, error.message, navigation=error.status != 401)
        except PolyremeError as error:
            response = self._error_page(404 if isinstance(error, NotFoundError) else 422, str(error))
        except web.HTTPException as error:
            if error.status < 400:
                harden(error)
                raise
            words = f"{error.reason.lower()}: {request.method} {request.path[:200]}"
            response = self._error_page(error.status, words)
            response.headers.update({name: value for name, value in error.headers.items() if name == "Allow"})
        except OSError as error:
            response = self._error_page(500, f"files can't be read: {error}")
        except Exception:  # noqa: BLE001 (a page that fails must not end the others)
            _log.exception("request failed: %s %s", request.method, request.path)
            response = self._error_page(500, "internal error: the terminal of the console has the details")
        if not response.prepared:
            harden(response)
        return response

    def _error_page(self, status: int, words: str, *, navigation: bool = True) -> web.Response:
        head = {401: "No session", 403: "Refused", 404: "Not found"}.get(status, "This can't be shown")
        body = f"<h1>{head}</h1>{markup.notice(words, 'bad')}"
        entries = self.console.navigation if navigation else ()
        return markup.html(markup.page(head, body, navigation=entries), status=status)

    async def _start(self, request: web.Request) -> web.StreamResponse:
        return self.guard.start(request)

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        return asset(request.match_info["name"])

    async def _refreshing(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._refresh())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self.console.threads.shutdown(wait=False, cancel_futures=True)

    async def _refresh(self) -> None:
        """Keep the index of runs up to date."""
        while True:
            self._changed.clear()
            try:
                took_s = await asyncio.to_thread(self.console.index.refresh)
            except Exception:  # noqa: BLE001 (the next look may succeed)
                _log.warning("index of runs not refreshed", exc_info=True)
                took_s = 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(REFRESH_S, took_s / REFRESH_SHARE))

    async def _stop(self, _: web.Application) -> None:
        self.console.stopped.set()


def declared_routes() -> list[Route]:
    """Return the routes that the modules of ``pages`` declare."""
    names = sorted(module.name for module in pkgutil.iter_modules(pages.__path__))
    return [route for name in names for route in importlib.import_module(f"{pages.__name__}.{name}").ROUTES]


def navigation(routes: list[Route]) -> list[tuple[str, str]]:
    """Return the navigation's entries, path and title, from left to right."""
    return [(route.path, route.title) for route in sorted(routes, key=lambda route: route.place) if route.title]
