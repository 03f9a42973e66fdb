"""A browser, a home with two finished runs, its console, and a window with a session; tests follow in one console."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import Console, Window, console_of
from tests.e2e.polyreme_home import PolyremeHome
from tools.chromium import driven

FOLDER = Path(__file__).parent
FIRST, SECOND = "first", "second"
SPEC = {
    "parallelism": {"mode": "Explicit", "dp": 1},
    "workers": {"replicas": 1, "devices": 1},
    "checkpoint": {"everySteps": 4, "keep": 3},
}
RATES = {FIRST: "2e-3", SECOND: "5e-4"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def driver() -> Iterator[tuple[Any, str, Any]]:
    """The browser, axe-core, and Playwright's ``expect``."""
    with driven() as started:
        yield started


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolyremeHome]:
    """A home with two runs that differ in one field."""

    home = PolyremeHome(tmp_path_factory.mktemp("home"))
    for name, rate in RATES.items():
        training = {"steps": 8, "packsPerStep": 4, "seed": 1, "optimizer": {"learningRate": rate}}
        ended = home.start(home.write_job(name, training=training, **SPEC)).end()
        assert ended.code == 0, ended.said
    yield home
    home.close()


@pytest.fixture(scope="session")
def console(home: PolyremeHome) -> Iterator[Console]:
    """The console of the home."""
    with console_of(home.path) as console:
        yield console


@pytest.fixture(scope="session")
def session(driver: tuple[Any, str, Any], console: Console) -> list[dict[str, Any]]:
    """Cookies of a session."""
    browser, axe, expect = driver
    window = Window(browser, axe, expect, origin=console.origin)
    window.page.goto(console.link)
    console.next_link()
    cookies: list[dict[str, Any]] = window.context.cookies()
    window.close()
    return cookies


@pytest.fixture
def window(driver: tuple[Any, str, Any], console: Console, session: list[dict[str, Any]]) -> Iterator[Window]:
    """A window with a session; what it must not have done fails the test."""
    browser, axe, expect = driver
    window = Window(browser, axe, expect, origin=console.origin)
    window.context.add_cookies(session)
    window.page.set_viewport_size({"width": 1280, "height": 900})
    yield window
    window.close()
    assert window.faults == []
