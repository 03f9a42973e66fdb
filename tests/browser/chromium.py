"""A person who uses the console in Chromium."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_MS = 120_000
"""Longest wait for a run to do something."""
SERIOUS = ("serious", "critical")
LOST = ".lost"
"""Line of a page that says that it hears nothing."""
LINE = 400
"""Characters of an error that are shown."""


class Window:
    """A window that keeps its faults: requests to other hosts, errors, what axe-core finds, pages that are too wide."""

    def __init__(self, browser: Any, axe: str, expect: Any, *, origin: str) -> None:
        self._browser, self._axe, self.expect, self.origin = browser, axe, expect, origin
        self.context = browser.new_context()
        self.context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        self.page = self.context.new_page()
        self.blank = browser.new_page()
        self.faults: list[str] = []
        self.refused_is_expected = False
        """Whether an answer of 401, 404 or 503, or none at all, is what the test is about."""
        self.context.on("request", self._on_request)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.faults.append(f"error of a script: {error}"))

    def close(self) -> None:
        """Close it."""
        self.blank.close()
        self.context.close()

    def go(self, path: str) -> Any:
        """Open a page of the console."""
        return self.page.goto(self.origin + path)

    def look(self, path: str, *, status: int = 200) -> None:
        """Open a page and examine it."""
        self.refused_is_expected = status != 200
        response = self.go(path)
        assert response.status == status, f"{path}: status {response.status}, expected {status}"
        if "sandbox" in response.headers.get("content-security-policy", ""):
            # No script runs in such a page, so axe-core reads a copy of it.
            self.blank.set_content(response.text())
            self.examine(self.blank)
        else:
            self.examine()

    def examine(self, page: Any = None) -> None:
        """Unfold what is folded; keep what axe-core finds, and whether the page is wider than the window."""
        page = self.page if page is None else page
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        for violation in self.violations(page):
            nodes = "; ".join(" ".join(map(str, node["target"])) for node in violation["nodes"][:4])
            self.faults.append(f"{page.url}: {violation['id']}, {violation['help']}: {nodes}"[:LINE])
        width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        if width > window:
            self.faults.append(f"{page.url}: {width} pixels in a window of {window}")

    def violations(self, page: Any) -> list[Any]:
        """Return what axe-core finds of weight."""
        page.evaluate(self._axe + "; 0")
        found = page.evaluate("axe.run({resultTypes: ['violations']}).then(result => result.violations)")
        return [each for each in found if each["impact"] in SERIOUS or each["id"] == "empty-table-header"]

    def sees(self, selector: str, words: Any = "") -> None:
        """Wait until an element with words is seen."""
        self.expect(self.page.locator(selector).filter(has_text=words).first).to_be_visible()

    def press(self, name: str) -> None:
        """Press a button."""
        self.page.get_by_role("button", name=name, exact=True).click()

    def act(self, title: str) -> None:
        """Unfold an action of a run and press its button."""
        self.page.locator(".actions summary").filter(has_text=title).click()
        self.press(title)

    def field(self, path: str) -> Any:
        """Return a field of the form of a job."""
        return self.page.locator(f"[name='set:{path}']")

    def mark(self) -> None:
        """Mark the document, which a load takes away."""
        self.page.evaluate("window.marked = true")

    def is_not_reloaded(self) -> None:
        """Fail if the page was loaded since it was marked."""
        assert self.page.evaluate("window.marked"), "the page was loaded again"

    def stranger(self) -> Any:
        """Return a page of a browser without a session."""
        return self._browser.new_page()

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((f"{self.origin}/", "data:")):
            self.faults.append(f"request to another host: {request.url}")

    def _on_console(self, message: Any) -> None:
        refused = any(
            words in message.text for words in ("Failed to load resource", "net::ERR", "htmx:sse:error", "htmx:error")
        )
        if message.type in {"error", "warning"} and not (refused and self.refused_is_expected):
            self.faults.append(f"{self.page.url}: {message.text}"[:LINE])


class Console:
    """A console in a process of its own, by the words that follow ``python -m``."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
        self.link = ""
        """The newest start link."""
        self.next_link()
        self.origin = self.link.partition("/start")[0]

    def next_link(self) -> None:
        """Wait for the link that is printed at the start, and after each one that was used."""
        assert self._process.stdout is not None
        self.link = next(line.strip() for line in self._process.stdout if "/start?" in line)

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Stop it, as Ctrl-C does."""
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def console_of(home: Path, *, port: int = 0) -> Iterator[Console]:
    """Serve a home."""
    with served("polyreme.main", "--home", str(home), "console", "--port", str(port)) as console:
        yield console


@contextmanager
def served(*words: str) -> Iterator[Console]:
    """Serve what a command shows."""
    console = Console(*words)
    try:
        yield console
    finally:
        console.close()
