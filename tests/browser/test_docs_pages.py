"""The docs' site, served as files: its search finds pages, and it asks no other host for anything."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Window

SITE = Path(__file__).parents[2] / "build/site"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        """Say nothing."""


@pytest.fixture
def origin() -> Iterator[str]:
    """Address of the site that ``make test-browser`` has built."""
    assert (SITE / "index.html").exists(), "build/site is missing; run make docs-site"
    handler = functools.partial(_Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_search_finds_a_field_and_nothing_comes_from_elsewhere(driver: tuple[Any, str, Any], origin: str) -> None:
    browser, axe, expect = driver
    window = Window(browser, axe, expect, origin=origin)
    window.go("/index.html")
    window.page.keyboard.press("s")
    window.page.locator(".md-search__input").fill("keepBest")
    expect(window.page.locator(".md-search-result__item").first).to_be_visible()
    window.page.locator(".md-search-result__item a").first.click()
    expect(window.page.locator("article")).to_contain_text("keepBest")
    window.close()
    assert window.faults == []
