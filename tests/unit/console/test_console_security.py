"""Every route of the console refuses what is not its user's: the table is made from the router."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from polyreme.console.assets import VENDORED, static_bytes, static_text
from polyreme.console.guard import FORM_TOKEN, START, LinkGuard
from polyreme.console.home.backend import HomeBackend
from polyreme.console.server import ConsoleServer
from polyreme.run_files.paths import Home
from polyreme_system.clock import SystemClock
from tests.unit.console.console_browser import Browser, with_browser


def routes() -> list[tuple[str, str]]:
    """Return method and path of each route that the router has."""
    backend = HomeBackend(Home(path=Path("/nowhere")), SystemClock())
    router = ConsoleServer(backend, LinkGuard()).application().router
    found = []
    for route in router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        for name in ("namespace", "name", "action", "version", "dataset", "rest"):
            path = path.replace(f"{{{name}}}", "x")
        assert "{" not in path, path
        found.append((route.method, path))
    return sorted(found)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home."""
    return tmp_path


async def status(browser: Browser, method: str, path: str, headers: dict[str, str], **form: str) -> int:
    data = form if method == "POST" else None
    async with browser.session.request(
        method, browser.origin + path, headers=headers, data=data, allow_redirects=False
    ) as response:
        assert response.status >= 500 or "Content-Security-Policy" in response.headers
        return response.status


@pytest.mark.parametrize(("method", "path"), [route for route in routes() if route[1] != START])
@with_browser
async def test_route_refuses_whoever_is_not_its_user(browser: Browser, method: str, path: str) -> None:
    own = {"Cookie": browser.cookie, "Origin": browser.origin}
    form = {FORM_TOKEN: browser.guard.form_token}
    assert await status(browser, method, path, {"Origin": browser.origin}, **form) == 401
    stranger = {"Cookie": browser.cookie.partition("=")[0] + "=other", "Origin": browser.origin}
    assert await status(browser, method, path, stranger, **form) == 401
    for origin in ("http://evil.example", "null", browser.origin.replace("http:", "https:"), f"{browser.origin}0"):
        assert await status(browser, method, path, own | {"Origin": origin}, **form) == 403
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
        both = own | {"Host": host, "Origin": f"http://{host}"}
        assert await status(browser, method, path, both, **form) == 403
    for wrong in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert await status(browser, wrong, path, own) in {403, 405}
    if method == "POST":
        assert await status(browser, method, path, {"Cookie": browser.cookie}, **form) == 403
        assert await status(browser, method, path, own) == 403
        assert await status(browser, method, path, own, **{FORM_TOKEN: "other"}) == 403


@with_browser
async def test_the_start_link_opens_one_browser(browser: Browser) -> None:
    first = browser.guard.start_path()
    headers = {"Host": "evil.example"}
    assert await status(browser, "GET", first, headers) == 403
    assert await status(browser, "HEAD", first, {}) == 303
    assert await status(browser, "GET", first, {}) == 303
    assert await status(browser, "GET", first, {}) == 401
    assert await status(browser, "GET", f"{START}?token=", {}) == 401
    assert browser.guard.start_path() != first
    assert "token=" not in await browser.get("/")


@with_browser
async def test_error_page_has_a_heading_in_words(browser: Browser) -> None:
    heads = []
    for headers in ({}, {"Cookie": browser.cookie, "Origin": "http://evil.example"}, {"Cookie": browser.cookie}):
        async with browser.session.get(f"{browser.origin}/runs/default/none", headers=headers) as response:
            heads.append((response.status, (await response.text()).partition("<h1>")[2].partition("</h1>")[0]))
    assert heads == [(401, "No session"), (403, "Refused"), (404, "Not found")]


@with_browser
async def test_pages_need_nothing_from_outside(browser: Browser) -> None:
    async with browser.session.get(browser.origin + "/", headers={"Cookie": browser.cookie}) as response:
        policy = response.headers["Content-Security-Policy"]
        text = await response.text()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "://" not in text
    assert " style=" not in text
    assert "<style" not in text


@with_browser
async def test_scripts_are_one_file_so_that_htmx_never_starts_without_its_extension(browser: Browser) -> None:
    sources = re.findall(r'<script defer src="([^"]+)"></script>', await browser.get("/"))
    assert len(sources) == 1
    script = await browser.get(sources[0])
    places = [script.index(static_text(name)) for name in ("htmx.min.js", "hx-sse.min.js", "live.js")]
    assert places == sorted(places)


@pytest.mark.parametrize("vendored", VENDORED, ids=lambda each: each.name)
def test_vendored_files_are_as_they_were_published(vendored: object) -> None:
    each = next(each for each in VENDORED if each is vendored)
    assert hashlib.sha256(static_bytes(each.name)).hexdigest() == each.sha256
