"""``make pictures``: the pictures of the README, from the quickstart and a sweep of learning rates in a home.

Needs Debian's ``chromium``. Runs that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
BROWSER = "chromium"
TABLE = "table.html"
RUN = ("run", "manifests/samples/quickstart.yaml", "--inject", "kill-rank=1@70")
ROWS, COLUMNS = 40, 120
FRAME = re.compile(r"\x1b\[2K(?:\x1b\[1A\x1b\[2K)+")
"""Between two states of a live table, rich's way back to its first line."""
SHOWN = "attempt 2 begins"
"""What the table says in the picture."""
RATES = "2e-3,1e-3,5e-4"
STEPS = 120


def main() -> int:
    """Train what is missing, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache/polyreme/pictures")
    home = parser.parse_args().home
    if shutil.which(BROWSER) is None:
        raise SystemExit(f"{BROWSER} is missing: install Debian's package of that name")
    os.environ["POLYREME_HOME"] = str(home)
    runs = home / "runs" / "default"
    if not (home / TABLE).exists():
        _run_in_terminal(home / TABLE)
        settings = [f"training.optimizer.learningRate={RATES}", f"training.steps={STEPS}", "data.schedule=[]"]
        _polyreme("sweep", "manifests/samples/quickstart.yaml", *(f"--set={each}" for each in settings))
    PICTURES.mkdir(exist_ok=True)
    _take((home / TABLE).as_uri(), PICTURES / "table.png", height=235)
    _take((runs / "quickstart/report/report.html").as_uri(), PICTURES / "report.png", height=860)
    with _console() as link:
        _take(link, PICTURES / "console.png", height=420)
    return 0


def _run_in_terminal(page: Path) -> None:
    """Train the quickstart in a terminal, and write what it showed half-way as a page."""
    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    command = [str(BIN / "polyreme"), *RUN]
    with subprocess.Popen(command, cwd=ROOT, stdin=other, stdout=other, stderr=other) as run:
        os.close(other)
        seen = bytearray()
        with contextlib.suppress(OSError):  # the terminal's end
            while part := os.read(own, 65_536):
                seen += part
    os.close(own)
    if run.returncode:
        raise SystemExit(f"polyreme {' '.join(RUN)} ended with {run.returncode}")
    frames = [frame for frame in FRAME.split(seen.decode()) if SHOWN in frame]
    screen = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    screen.print(Text.from_ansi(f"$ polyreme {' '.join(RUN)}\n{frames[len(frames) // 2]}"))
    page.write_text(screen.export_html(theme=MONOKAI, inline_styles=True))


def _polyreme(*arguments: str) -> None:
    subprocess.run([str(BIN / "polyreme"), *arguments], cwd=ROOT, check=True)


@contextlib.contextmanager
def _console() -> Iterator[str]:
    """Start the console; yield the link that opens a session."""
    with subprocess.Popen([str(BIN / "polyreme"), "console", "--port", "0"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            yield next(line.strip() for line in run.stdout if "/start?token=" in line)
        finally:
            run.terminate()


def _take(url: str, picture: Path, *, height: int) -> None:
    with tempfile.TemporaryDirectory() as profile:
        ways = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        size = [f"--window-size=1200,{height}", f"--screenshot={picture}"]
        subprocess.run([BROWSER, *ways, *size, url], check=True, capture_output=True)


if __name__ == "__main__":
    raise SystemExit(main())
