"""Pages in Chromium, each in a window without a cache: time until something is seen, and bytes that came."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tools.chromium import driven

LOOK_MS_MAX = 300_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a page cost."""

    seconds: float
    kib: float


class Browser:
    """A browser whose every page begins with nothing.

    Args:
        started: Chromium, as Playwright started it.
    """

    def __init__(self, started: Any) -> None:
        self._browser = started

    def session(self, link: str) -> list[dict[str, Any]]:
        """Return the cookies that a link gives."""
        context = self._browser.new_context()
        context.new_page().goto(link)
        cookies: list[dict[str, Any]] = context.cookies()
        context.close()
        return cookies

    def look(self, url: str, *, until: str, cookies: Sequence[Any] = ()) -> Look:
        """Open a page and wait until a script's expression is true."""
        context = self._browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies(list(cookies))
        page = context.new_page()
        received = [0.0]
        network = context.new_cdp_session(page)
        network.send("Network.enable")
        network.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        began_s = time.perf_counter()
        page.goto(url, wait_until="commit", timeout=LOOK_MS_MAX)
        page.wait_for_function(until, timeout=LOOK_MS_MAX, polling="raf")
        seconds = time.perf_counter() - began_s
        page.wait_for_timeout(100)
        context.close()
        return Look(seconds=seconds, kib=sum(received) / 1024)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start the browser."""
    with driven() as (started, _, _):
        yield Browser(started)
