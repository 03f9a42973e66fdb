"""``make pictures``: the pictures of the README, from the quickstart and a sweep of learning rates in a home.

Needs Debian's ``chromium``. Runs that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
BROWSER = "chromium"
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
    if not (runs / "quickstart").exists():
        _polyreme("run", "manifests/samples/quickstart.yaml", "--inject", "kill-rank=1@70")
        settings = [f"training.optimizer.learningRate={RATES}", f"training.steps={STEPS}", "data.schedule=[]"]
        _polyreme("sweep", "manifests/samples/quickstart.yaml", *(f"--set={each}" for each in settings))
    PICTURES.mkdir(exist_ok=True)
    _take((runs / "quickstart/report/report.html").as_uri(), PICTURES / "report.png", height=860)
    with _console() as link:
        _take(link, PICTURES / "console.png", height=420)
    return 0


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
