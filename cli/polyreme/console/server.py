"""Server of a console: the routes of its pages and one guard before them."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import ModuleType

from aiohttp import web

from polyreme.console import markup
from polyreme.console.assets import asset
from polyreme.console.context import Backend, Console
from polyreme.console.guard import Guard, RefusedRequestError, harden
from polyreme.console.route import Route
from polyreme_api.errors import NotFoundError, PolyremeError

BODY_BYTES_MAX = 4 * 2**20
AWAY_RELOAD_S = 5
"""A page that could not be had since the cluster was away is loaded again by the browser so often [s]."""
_Next = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class ConsoleServer:
    """Answers browsers.

    Args:
        backend: Whose runs it shows.
        guard: Who may ask.
    """

    def __init__(self, backend: Backend, guard: Guard) -> None:
        self._routes = declared_routes(backend.pages)
        self.guard = guard
        self.console = Console(
            backend=backend, guard=guard, navigation=navigation(self._routes), stopped=asyncio.Event()
        )

    def application(self) -> web.Application:
        """Return the routes."""
        made = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._check])
        for method, path, handle in self.guard.routes():
            (made.router.add_get if method == "GET" else made.router.add_post)(path, handle)
        made.router.add_get("/assets/{version}/{name}", self._asset)
        for route in self._routes:
            made.router.add_route(route.method, route.path, functools.partial(route.handle, self.console))
        made.cleanup_ctx.append(self._running)
        made.on_shutdown.append(self._stop)
        return made

    @web.middleware
    async def _check(self, request: web.Request, handler: _Next) -> web.StreamResponse:
        """Refuse what the guard refuses, and turn errors into pages."""
        try:
            await self.guard.check(request)
            response = await handler(request)
        except RefusedRequestError as error:
            response = self._error_page(error.status, error.message)
            if error.status == web.HTTPServiceUnavailable.status_code and request.method == "GET":
                response.headers["Refresh"] = str(AWAY_RELOAD_S)
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

    def _error_page(self, status: int, words: str) -> web.Response:
        head = {401: "No session", 403: "Refused", 404: "Not found", 503: "The cluster is away"}.get(status)
        head = head or "This can't be shown"
        way_in = self.guard.way_in() if status == 401 else ""
        body = f"<h1>{head}</h1>{markup.notice(words, 'bad')}{way_in}"
        entries = () if status == 401 else self.console.navigation
        return markup.html(markup.page(head, body, navigation=entries), status=status)

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        return asset(request.match_info["name"])

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        async with self.console.backend.running():
            yield

    async def _stop(self, _: web.Application) -> None:
        self.console.stopped.set()


def declared_routes(packages: Sequence[ModuleType]) -> list[Route]:
    """Return the routes that the modules of packages declare."""
    names = [
        f"{package.__name__}.{module.name}" for package in packages for module in pkgutil.iter_modules(package.__path__)
    ]
    return [route for name in sorted(names) for route in importlib.import_module(name).ROUTES]


def navigation(routes: Sequence[Route]) -> list[tuple[str, str]]:
    """Return the navigation's entries, path and title, from left to right."""
    return [(route.path, route.title) for route in sorted(routes, key=lambda route: route.place) if route.title]
