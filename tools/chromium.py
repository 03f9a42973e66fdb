"""Chromium from Debian, driven by Playwright, with axe-core; those two are in an environment of their own."""

from __future__ import annotations

import importlib
import os
import site
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools import debian
from tools.build_cache import BuildError
from tools.environments import environment, pinned

PINNED = Path(__file__).with_name("chromium.txt")


@contextmanager
def driven() -> Iterator[tuple[Any, str, Any]]:
    """Start the browser; gives it, the text of axe-core, and Playwright's ``expect``.

    Raises:
        BuildError: If there is no Chromium and it can't be had, with what to do.
    """
    program = _chromium()
    python = environment("browser-peers", pinned(PINNED), "--no-deps")
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    site.addsitedir(str(packages))
    playwright = importlib.import_module("playwright.sync_api")
    axe = (packages / "axe_playwright_python/axe.min.js").read_text()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program)
        try:
            yield browser, axe, playwright.expect
        finally:
            browser.close()


def _chromium() -> str:
    """Return the program: that of POLYREME_CHROMIUM, or Debian's, which root gets once."""
    if named := os.environ.get("POLYREME_CHROMIUM"):
        return named
    try:
        debian.install(debian.FOR_BROWSER)
    except BuildError as error:
        raise BuildError(f"{error}; or name another Chromium by POLYREME_CHROMIUM") from error
    return "/usr/bin/chromium"
