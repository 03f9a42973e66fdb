"""``make soak-effects``: a small flow is killed before, within and after each of its effects, or loses a reply.

An effect is a transaction that writes, or a put into the store. Another process goes on after each kill, and after
each lost reply that the run itself did not get over. Both must end with the index of an undisturbed run. ``EVERY=3``
takes every third effect only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.datahub.crashing import AWAY, NO_SUCH_EFFECT
from tests.unit.datahub.jobs import Home, digits, picture, record, write_jsonl

ROOT = Path(__file__).parents[2]
PAGES = 40
EFFECTS_MAX = 1000


def main() -> int:
    """Run; 0 when every run ended with the same index."""
    every = int(os.environ.get("EVERY") or 1)
    with tempfile.TemporaryDirectory(prefix="polyreme-soak-") as name:
        folder = Path(name)
        home = plant(folder)
        expected = run(copy(home, folder / "whole"), 0)
        figures = {
            kind: walk(home, folder, expected.stdout, lost=kind == "replies_lost", every=every)
            for kind in ("kills", "replies_lost")
        }
    wrong = {kind: found for kind, (_, found) in figures.items()}
    ok = expected.returncode == 0 and not any(wrong.values()) and all(count for count, _ in figures.values())
    shown = {kind: count for kind, (count, _) in figures.items()} | {"wrong": wrong}
    sys.stdout.write(json.dumps({"name": "soak-effects", "figures": shown, "bar": {"wrong": 0}, "ok": ok}) + "\n")
    return 0 if ok else 1


def plant(folder: Path) -> Home:
    """Register two small datasets, one with bad records, in a home that is copied for each run."""
    (folder / "set").mkdir()
    (folder / "set/good.png").write_bytes(picture(90, 60))
    (folder / "set/cut.jpg").write_bytes(picture(200, 150, kind="JPEG")[:900])
    lines: list[dict[str, Any] | str] = [record("a", ["good.png"]), record("b", ["cut.jpg"]), "{", record("c")]
    home = Home(folder / "home")
    home.folder.mkdir()
    home.register("two", digits(2, pages=PAGES))
    home.register("files", write_jsonl(folder / "set", lines))
    return home


def walk(home: Home, folder: Path, expected: str, *, lost: bool, every: int) -> tuple[int, list[str]]:
    """Disturb a run at each effect; return how many there were, and what went wrong."""
    wrong: list[str] = []
    for count, effect in enumerate(range(1, EFFECTS_MAX, every)):
        mine = copy(home, folder / "doomed")
        done = run(mine, effect, lost=lost)
        if done.returncode == NO_SUCH_EFFECT:
            return count, wrong
        if done.returncode == (AWAY if lost else -signal.SIGKILL):
            done = run(mine, 0)
        if done.returncode or done.stdout != expected:
            wrong.append(f"effect {effect}: code {done.returncode}: {done.stdout}{done.stderr[-500:]}")
            sys.stderr.write(wrong[-1] + "\n")
    raise AssertionError(f"more than {EFFECTS_MAX} effects")


def copy(home: Home, folder: Path) -> Home:
    """Copy a home in place of one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home.folder, folder)
    return Home(folder)


def run(home: Home, effect: int, *, lost: bool = False) -> subprocess.CompletedProcess[str]:
    """Process a home in a process of its own."""
    call = [sys.executable, "-m", "tests.unit.datahub.crashing", str(home.folder), str(effect), home.registry]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*call, *(["lost"] if lost else [])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=300,
    )


if __name__ == "__main__":
    raise SystemExit(main())
