"""Chromium from Debian; Playwright and axe-core from PyPI.

Those are in an environment of their own below ``~/.cache/polyreme``, made once for pinned versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools import debian
from tools.build_cache import BuildError

PINNED = Path(__file__).with_name("chromium.txt")


def chromium() -> str:
    """Return the program: that of POLYREME_CHROMIUM, or Debian's, which root gets once.

    Raises:
        BuildError: If it is not there and can't be had, with what to do.
    """
    if named := os.environ.get("POLYREME_CHROMIUM"):
        return named
    try:
        debian.install(debian.FOR_BROWSER)
    except BuildError as error:
        raise BuildError(f"{error}; or name another Chromium by POLYREME_CHROMIUM") from error
    return "/usr/bin/chromium"


def peers() -> tuple[Any, str]:
    """Return Playwright and the text of axe-core."""
    digest = hashlib.sha256(PINNED.read_bytes()).hexdigest()[:12]
    folder = Path.home() / f".cache/polyreme/browser-peers-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".made").exists():
            uv = Path(sys.executable).with_name("uv")
            subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
            install = ["pip", "install", "--quiet", "--no-deps", "--python", str(folder / "bin/python")]
            subprocess.run([uv, *install, "--requirements", PINNED], check=True)
            (folder / ".made").touch()
    (packages,) = folder.glob("lib/python*/site-packages")
    site.addsitedir(str(packages))
    return importlib.import_module("playwright.sync_api"), (packages / "axe_playwright_python/axe.min.js").read_text()
