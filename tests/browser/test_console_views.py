"""Each page that the console declares, wide, narrow and dark: accessible, quiet, within the window, no outsiders."""

from __future__ import annotations

import pytest

from polyreme.console.home.backend import HomeBackend
from polyreme.console.server import declared_routes
from tests.browser.chromium import Window
from tests.browser.conftest import FIRST, SECOND

VALUES = {"namespace": "default", "name": FIRST}
"""What the pages' paths are filled with; a placeholder that is missing here is an error."""
BOTH = f"/compare?run=default/{FIRST}&run=default/{SECOND}"
FURTHER = (BOTH, "/data?dataset=sample/digits-1", f"/submit?from=default/{FIRST}", "/?text=none", "/runs/default/none")


def declared_pages() -> list[str]:
    paths = [route.path for route in declared_routes(HomeBackend.pages) if route.method == "GET"]
    return [path.format_map(VALUES) for path in paths if not path.startswith("/live/")]


def test_axe_finds_a_picture_without_words(window: Window) -> None:
    window.blank.set_content("<img src='data:,'>")
    assert "image-alt" in [each["id"] for each in window.violations(window.blank)]


@pytest.mark.parametrize(("width", "colors"), [(1280, "light"), (360, "light"), (1280, "dark")])
def test_pages_are_accessible_and_fit_the_window(window: Window, width: int, colors: str) -> None:
    for page in (window.page, window.blank):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=colors)
    for path in (*declared_pages(), *FURTHER):
        window.look(path, status=404 if path.endswith("/none") else 200)
        if path.partition("?")[0].count("/report") + path.count("/preview") == 0:
            window.expect(window.page.locator("h1")).to_have_count(1)
