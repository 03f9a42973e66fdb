"""A console of a kept home, and a client with a session, as a browser has it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, DummyCookieJar
from aiohttp.test_utils import BaseTestServer, TestServer

from polyreme.console.guard import FORM_TOKEN, LinkGuard
from polyreme.console.home.backend import HomeBackend
from polyreme.console.home.source import HomeSource
from polyreme.console.server import ConsoleServer
from polyreme.run_files.paths import Home
from polyreme_system.clock import SystemClock


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Browser:
    """What a browser with a session may do."""

    session: ClientSession
    server: BaseTestServer
    guard: LinkGuard
    source: HomeSource
    cookie: str

    @property
    def origin(self) -> str:
        """The console's own origin."""
        return str(self.server.make_url("/")).rstrip("/")

    async def get(self, path: str, *, status: int = 200) -> str:
        """Return a page."""
        async with self.session.get(self.origin + path, headers={"Cookie": self.cookie}) as response:
            text = await response.text()
            assert response.status == status, text
            return text

    async def post(self, path: str, *, status: int, **fields: str) -> str:
        """Send a form of one of the console's own pages; return the answer, or where it leads."""
        headers = {"Cookie": self.cookie, "Origin": self.origin}
        form = {FORM_TOKEN: self.guard.form_token, **fields}
        async with self.session.post(self.origin + path, data=form, headers=headers, allow_redirects=False) as response:
            text = await response.text()
            assert response.status == status, text
            return response.headers.get("Location", text)


@contextlib.asynccontextmanager
async def open_browser(home: Path) -> AsyncIterator[Browser]:
    """Serve a home, and open a session by the start link."""
    backend, guard = HomeBackend(Home(path=home), SystemClock()), LinkGuard()
    async with (
        TestServer(ConsoleServer(backend, guard).application()) as server,
        ClientSession(cookie_jar=DummyCookieJar()) as session,
    ):
        backend.home.index.refresh()
        link = server.make_url(guard.start_path())
        async with session.get(link, allow_redirects=False) as response:
            assert response.status == 303
            cookie = response.headers["Set-Cookie"]
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
        yield Browser(session=session, server=server, guard=guard, source=backend.home, cookie=cookie.partition(";")[0])


def with_browser(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in a loop, with a ``browser`` of the fixture ``home``."""

    async def story(*, home: Path, **given: Any) -> None:
        async with open_browser(home) as browser:
            wanted = {"home": home} if "home" in known else {}
            await test(browser=browser, **wanted, **given)

    @functools.wraps(test)
    def run(*, home: Path, **given: Any) -> None:
        asyncio.run(story(home=home, **given))

    known = inspect.signature(test).parameters
    others = [one.replace(kind=one.KEYWORD_ONLY) for name, one in known.items() if name not in {"browser", "home"}]
    own = inspect.Parameter("home", inspect.Parameter.KEYWORD_ONLY, annotation=Path)
    run.__signature__ = inspect.Signature([own, *others])  # type: ignore[attr-defined]
    return run
