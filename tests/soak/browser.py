"""``make soak-browser``: the pages of the console in Chromium, and what a person does with them.

Each page that the console declares is opened 1280 and 390 pixels wide, and dark, on a home with two finished runs:
axe-core finds nothing serious, no request leaves the console, nothing is written to the browser's console, and no page
is wider than the window. Then runs are compared, submitted, followed, cloned, suspended and deleted. Chromium is that
of the machine, or POLYREME_CHROMIUM; Playwright and axe-core are installed once, below ``~/.cache/polyreme``."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme.console.home.backend import HomeBackend
from polyreme.console.server import declared_routes
from polyreme_api.exit_codes import ExitCode
from tests.e2e.polyreme_home import PolyremeHome

PEERS = Path(__file__).with_name("browser_peers.txt")
CHROMIUM = "/usr/bin/chromium"
WAIT_MS = 120_000
"""Longest wait for a run to do something."""
VIEWS = {"1280": (1280, "light"), "390": (390, "light"), "dark": (1280, "dark")}
LINE = 400
"""Characters of an error that are shown."""
SERIOUS = ("serious", "critical")
FIRST, SECOND, LIVE, CLONE = "first", "second", "live", "live-2"
HOSTILE = "<img src=x onerror=document.body.id='hit'>"
VALUES = {"namespace": "default", "name": FIRST}
"""What the pages' paths are filled with."""
BOTH = f"/compare?run=default/{FIRST}&run=default/{SECOND}"
FURTHER = (BOTH, "/data?dataset=sample/digits-1", f"/submit?from=default/{FIRST}", "/?text=none", "/runs/default/none")
SPEC = {
    "parallelism": {"mode": "Explicit", "dp": 1},
    "workers": {"replicas": 1, "devices": 1},
    "checkpoint": {"everySteps": 4, "keep": 3},
}
RATES = {FIRST: "2e-3", SECOND: "5e-4"}


def main() -> int:
    """Run; 0 when every page and every flow is as it should be."""
    chromium = os.environ.get("POLYREME_CHROMIUM") or CHROMIUM
    if not os.access(chromium, os.X_OK):
        sys.stderr.write(
            f"soak-browser: {chromium} is no program; install Debian's package chromium (apt-get install chromium), "
            "or name another Chromium by POLYREME_CHROMIUM\n"
        )
        return ExitCode.ENVIRONMENT
    begun_s = time.monotonic()
    playwright, axe = peers()
    found = Found()
    with tempfile.TemporaryDirectory() as folder, playwright.sync_playwright() as driver:
        home = home_with_runs(Path(folder))
        console = Console(Path(folder))
        browser = driver.chromium.launch(executable_path=chromium)
        try:
            user = User(browser, console, axe, found, playwright.expect)
            pages = user.look_at_pages()
            flows = user.follow_flows(home)
        finally:
            browser.close()
            console.close()
            home.close()
    figures = {"pages": pages, "flows": flows, **found.counts(), "wall_s": round(time.monotonic() - begun_s)}
    ok = not found.sentences
    sys.stderr.writelines(f"{kind}: {sentence}\n" for kind, sentence in found.sentences)
    print(json.dumps({"name": "soak-browser", "figures": figures, "bar": dict.fromkeys(found.counts(), 0), "ok": ok}))
    return 0 if ok else 1


def peers() -> tuple[Any, str]:
    """Return Playwright and the text of axe-core from their own environment, made once for the pinned versions."""
    digest = hashlib.sha256(PEERS.read_bytes()).hexdigest()[:12]
    folder = Path.home() / f".cache/polyreme/browser-peers-{digest}"
    if not (folder / ".made").exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        install = ["pip", "install", "--quiet", "--no-deps", "--python", str(folder / "bin/python")]
        subprocess.run([uv, *install, "--requirements", PEERS], check=True)
        (folder / ".made").touch()
    (packages,) = folder.glob("lib/python*/site-packages")
    site.addsitedir(str(packages))
    return importlib.import_module("playwright.sync_api"), (packages / "axe_playwright_python/axe.min.js").read_text()


def home_with_runs(folder: Path) -> PolyremeHome:
    """Return a home with two runs that differ in one field."""
    home = PolyremeHome(folder)
    for name, rate in RATES.items():
        training = {"steps": 8, "packsPerStep": 4, "seed": 1, "optimizer": {"learningRate": rate}}
        ended = home.start(home.write_job(name, training=training, **SPEC)).end()
        assert ended.code == 0, ended.said
    return home


def declared_pages() -> list[str]:
    """Return the paths of the pages that the console declares; a placeholder that VALUES lacks is an error."""
    paths = [route.path for route in declared_routes(HomeBackend.pages) if route.method == "GET"]
    return [path.format_map(VALUES) for path in paths if not path.startswith("/live/")]


@dataclasses.dataclass
class Found:
    """What is not as it should be."""

    sentences: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add(self, kind: str, sentence: str) -> None:
        """Keep a sentence."""
        self.sentences.append((kind, sentence))

    def counts(self) -> dict[str, int]:
        """Return how many there are of each kind."""
        kinds = ("inaccessible", "outside_requests", "console_errors", "unanswered", "too_wide", "flows_failed")
        return {kind: sum(each == kind for each, _ in self.sentences) for kind in kinds}


class Console:
    """A console of a home, in a process of its own."""

    def __init__(self, home: Path) -> None:
        command = [sys.executable, "-m", "polyreme.main", "--home", str(home), "console", "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.link = ""
        """The newest start link."""
        self.next_link()
        self.origin = self.link.partition("/start")[0]

    def next_link(self) -> None:
        """Wait for the link that is printed at the start, and after each one that was used."""
        assert self._process.stdout is not None
        self.link = next(line.strip() for line in self._process.stdout if "/start?" in line)

    def close(self) -> None:
        """Stop it, as Ctrl-C does."""
        self._process.terminate()
        self._process.wait()


class User:
    """A person with a browser, whose requests and errors are kept."""

    def __init__(self, browser: Any, console: Console, axe: str, found: Found, expect: Any) -> None:
        self._browser, self._console, self._axe, self._found, self._expect = browser, console, axe, found, expect
        self._context = browser.new_context()
        self._context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        self._page = self._context.new_page()
        self._blank = self._browser.new_page()
        self._used = console.link
        self._page.goto(console.link)
        console.next_link()
        self._at = "start"
        self._context.on("request", self._on_request)
        self._page.on("console", self._on_console)
        self._page.on("pageerror", lambda error: self._found.add("console_errors", f"{self._at}: {error}"))

    def look_at_pages(self) -> int:
        """Open each page in each view; return how many pages there are."""
        self._blank.set_content("<img src='data:,'>")
        assert "image-alt" in [each["id"] for each in self._violations(self._blank)], "axe-core finds nothing here"
        paths = [*declared_pages(), *FURTHER]
        for view, (width, colors) in VIEWS.items():
            for page in (self._page, self._blank):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=colors)
            for path in paths:
                self._at = f"{view} {path}"
                self._look(path, status=404 if path.endswith("/none") else 200)
        return len(paths)

    def follow_flows(self, home: PolyremeHome) -> int:
        """Do what a person does, one after another; return how many flows there are."""
        flows: list[Callable[[], None]] = [
            self._used_link_is_refused,
            self._filter_and_compare,
            self._mistake_is_shown_with_its_field,
            self._submit_and_follow_to_success,
            self._clone_with_one_change,
            self._suspend,
            self._delete,
            lambda: self._names_are_text(home.path),
        ]
        self._page.set_viewport_size({"width": 1280, "height": 900})
        self._page.emulate_media(color_scheme="light")
        for flow in flows:
            self._at = getattr(flow, "__name__", "").strip("_<>")
            try:
                flow()
            except Exception as error:  # noqa: BLE001 (each flow that fails is reported)
                self._found.add("flows_failed", f"{self._at} at {self._page.url}: {str(error)[:LINE]}")
        return len(flows)

    def _look(self, path: str, *, status: int) -> None:
        response = self._page.goto(self._console.origin + path)
        if response.status != status:
            self._found.add("unanswered", f"{self._at}: status {response.status}, expected {status}")
        if "sandbox" in response.headers.get("content-security-policy", ""):
            # No script runs in such a page, so axe-core reads a copy of it.
            self._blank.set_content(response.text())
            self._examine(self._blank)
        else:
            self._examine(self._page)

    def _examine(self, page: Any) -> None:
        """Unfold what is folded; note what axe-core finds, and whether the page is wider than the window."""
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        for violation in self._violations(page):
            nodes = "; ".join(" ".join(map(str, node["target"])) for node in violation["nodes"][:4])
            self._found.add("inaccessible", f"{self._at}: {violation['id']}, {violation['help']}: {nodes}")
        width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        if width > window:
            self._found.add("too_wide", f"{self._at}: {width} pixels in a window of {window}")

    def _violations(self, page: Any) -> list[Any]:
        page.evaluate(self._axe + "; 0")
        found = page.evaluate("axe.run().then(result => result.violations)")
        return [each for each in found if each["impact"] in SERIOUS]

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((f"{self._console.origin}/", "data:")):
            self._found.add("outside_requests", f"{self._at}: {request.url}")

    def _on_console(self, message: Any) -> None:
        expected = "status of 4" in message.text and self._page.url.endswith("/none")
        if message.type in {"error", "warning"} and not expected:
            self._found.add("console_errors", f"{self._at}: {message.text}")

    def _go(self, path: str) -> None:
        self._page.goto(self._console.origin + path)

    def _sees(self, selector: str, words: str | re.Pattern[str] = "") -> None:
        """Wait until an element with words is seen."""
        self._expect(self._page.locator(selector).filter(has_text=words).first).to_be_visible()

    def _press(self, name: str) -> None:
        self._page.get_by_role("button", name=name, exact=True).click()

    def _act(self, title: str) -> None:
        """Unfold an action of a run and press its button."""
        self._page.locator(".actions summary").filter(has_text=title).click()
        self._press(title)

    def _used_link_is_refused(self) -> None:
        stranger = self._browser.new_page()
        response = stranger.goto(self._used)
        assert response.status == 401, response.status
        self._expect(stranger.locator("h1")).to_have_text("No session")
        self._expect(stranger.locator("nav a")).to_have_count(0)
        self._examine(stranger)
        stranger.close()

    def _filter_and_compare(self) -> None:
        self._go("/")
        rows = self._page.locator("table.runs tbody tr")
        self._page.get_by_label("Fields").fill(f"training.optimizer.learningRate={RATES[FIRST]}")
        self._press("Filter")
        self._expect(rows).to_have_count(1)
        self._sees("table.runs td.name", FIRST)
        self._page.get_by_label("Fields").fill("")
        self._press("Filter")
        self._expect(rows).to_have_count(2)
        for name in (FIRST, SECOND):
            self._page.get_by_role("checkbox", name=name, exact=True).check()
        self._press("Compare the chosen runs")
        self._expect(self._page.locator("h1")).to_have_text("Compare")
        self._sees("tr", "training.optimizer.learningRate")
        self._page.get_by_role("link", name="held-out loss", exact=True).click()
        self._sees("[aria-current]", "held-out loss")

    def _mistake_is_shown_with_its_field(self) -> None:
        self._go(f"/submit?from=default/{FIRST}")
        self._field("training.steps").fill("0")
        self._press("Check")
        self._sees("#result .notice.bad", "spec.training.steps")
        self._examine(self._page)
        self._field("metadata.name").fill(HOSTILE)
        self._press("Check")
        self._sees("#result .notice.bad", "<img")
        self._expect(self._page.locator("img")).to_have_count(0)

    def _submit_and_follow_to_success(self) -> None:
        self._go(f"/submit?from=default/{FIRST}")
        self._field("metadata.name").fill(LIVE)
        self._field("training.steps").fill("40")
        self._press("Check")
        self._sees("#result .notice", "The job is accepted.")
        self._examine(self._page)
        self._expect(self._page).to_have_url(re.compile("/submit"))
        self._press("Submit")
        self._expect(self._page).to_have_url(f"{self._console.origin}/runs/default/{LIVE}")
        self._page.evaluate("window.sameDocument = true")
        self._sees(".actions summary", "Suspend")
        self._examine(self._page)
        self._sees(".badge", "Succeeded")
        self._sees(".notice.good", "is done")
        assert self._page.evaluate("window.sameDocument"), "the page was loaded again"
        self._examine(self._page)

    def _clone_with_one_change(self) -> None:
        self._page.get_by_role("link", name="Clone with changes").click()
        self._expect(self._field("metadata.name")).to_have_value(CLONE)
        self._expect(self._field("training.steps")).to_have_value("40")
        self._field("training.steps").fill("100000")
        self._press("Check")
        self._sees("#result", "Changed: training.steps=100000")
        self._press("Submit")
        self._expect(self._page).to_have_url(f"{self._console.origin}/runs/default/{CLONE}")
        self._sees(".badge", "Running")

    def _suspend(self) -> None:
        self._act("Suspend")
        self._sees(".actions summary", "Resume")
        self._sees(".badge", "Stopped")
        self._examine(self._page)

    def _delete(self) -> None:
        self._go(f"/runs/default/{CLONE}")
        self._act("Delete")
        self._expect(self._page).to_have_url(f"{self._console.origin}/")
        self._sees("table.runs td.name", LIVE)
        self._expect(self._page.get_by_role("checkbox", name=CLONE, exact=True)).to_have_count(0)

    def _names_are_text(self, home: Path) -> None:
        hostile = home / "runs/default" / HOSTILE
        shutil.copytree(home / "runs/default" / FIRST, hostile)
        state = json.loads((hostile / "state.json").read_text())
        (hostile / "state.json").write_text(json.dumps(state | {"state": HOSTILE, "message": HOSTILE}))
        self._go("/")
        self._sees("table.runs td.name", HOSTILE)
        for path in ("/", f"/?text={HOSTILE}", f"/compare?run=default/{HOSTILE}&run=default/{FIRST}", "/submit"):
            self._go(path)
            self._sees("main", HOSTILE)
            self._expect(self._page.locator("img")).to_have_count(0)
            assert self._page.evaluate("document.body.id") != "hit"

    def _field(self, path: str) -> Any:
        return self._page.locator(f"[name='set:{path}']")


if __name__ == "__main__":
    raise SystemExit(main())
