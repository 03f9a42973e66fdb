"""``make soak-preference``: a run that scores pairs and trains on them is killed at random points, and run again.

``KILLS=`` kills, 20 by default, half of them while pairs are scored; ``SEED=`` repeats their moments. Every loss must
be bit for bit that of an undisturbed run, and a second run of the same reference must score no pair."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.polyreme_home import PolyremeHome, Serving, unless_gone

KILLS = 20
READ, PREFER = 12, 24
SCORING = "pairs have a reference score"


def main() -> int:
    """Run; 0 when no kill changed anything."""
    kills, seed = int(os.environ.get("KILLS") or KILLS), int(os.environ.get("SEED") or 1)
    draw = random.Random(seed)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = PolyremeHome(Path(folder))
        try:
            expected, scoring_s = undisturbed(home)
            parts = stored(home)
            again = home.call("run", str(home.write_job("again", **spec())))
            assert again.code == 0, again.said
            scored_again = len(stored(home) - parts)
            different = killed = while_scoring = 0
            for number in range(kills):
                forget(home)
                held = killed_and_continued(home, f"killed-{number}", draw, scoring_s=scoring_s * (number % 2))
                killed += 1
                while_scoring += held[0]
                different += held[1] != expected
                print(f"kill {number + 1} of {kills}: {'scoring' if held[0] else 'training'}", file=sys.stderr)
        finally:
            home.close()
    figures = {
        "kills": killed,
        "while_scoring": while_scoring,
        "different_losses": different,
        "scored_again": scored_again,
        "seed": seed,
        "wall_s": round(time.monotonic() - begun_s),
    }
    bar: dict[str, int] = {"different_losses": 0, "scored_again": 0}
    ok = all(figures[name] == value for name, value in bar.items()) and while_scoring > 0
    print(json.dumps({"name": "soak-preference", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def spec() -> dict[str, Any]:
    """Read digits for a few steps, then prefer words."""
    stages = [
        {"name": "read", "steps": READ},
        {
            "name": "prefer",
            "steps": PREFER,
            "objective": {"kind": "Preference"},
            "weights": [{"source": "preferred", "weight": 1}],
        },
    ]
    sources = [
        {"name": "digits", "dataset": "sample/digits-1", "weight": 1},
        {"name": "preferred", "dataset": "sample/digits-1-preferred", "weight": 0},
    ]
    return {
        "data": {"sequenceTokens": 160, "seed": 17, "sources": sources},
        "training": {"steps": READ + PREFER, "packsPerStep": 4, "seed": 1, "stages": stages},
        "parallelism": {"mode": "Explicit", "dp": 2, "ep": 2},
        "workers": {"replicas": 1, "devices": 2},
        "checkpoint": {"everySteps": 5, "keep": 3},
    }


def undisturbed(home: PolyremeHome) -> tuple[dict[int, str], float]:
    """Losses of a run that nothing happens to, and how long it scored [s]."""
    running = home.start(home.write_job("undisturbed", **spec()))
    running.until(lambda: scores(running), "pairs are scored")
    begun_s = time.monotonic()
    running.until(lambda: running.step(1) > READ, "the stage has begun")
    scoring_s = time.monotonic() - begun_s
    ended = running.end()
    assert ended.code == 0, ended.said
    return home.losses("undisturbed"), scoring_s


def killed_and_continued(
    home: PolyremeHome, name: str, draw: random.Random, *, scoring_s: float
) -> tuple[bool, dict[int, str]]:
    """Kill a run while it scores, or while it trains; return whether it did score, and its losses in the end."""
    job = home.write_job(name, **spec())
    running = home.start(job)
    if scoring_s:
        running.until(lambda: scores(running), "pairs are scored")
        time.sleep(draw.uniform(0.0, scoring_s))
    else:
        steps = draw.randint(1, READ + PREFER - 3)
        running.until(lambda: running.step(1) >= steps, "it trains")
    scored = scores(running) and running.step(1) == READ
    unless_gone(running.kill_all)
    ended = home.call("run", str(job))
    assert ended.code == 0, ended.said
    return scored, home.losses(name)


def scores(running: Serving) -> bool:
    """Whether the run says that it scores."""
    state = running.run.state_file
    return state.exists() and SCORING in state.read_text()


def stored(home: PolyremeHome) -> set[Path]:
    """Parts of scores in the lakehouse."""
    return set((home.path / "data" / "objects" / "reference-scores").rglob("*.npz"))


def forget(home: PolyremeHome) -> None:
    """Delete the scores of all runs."""
    shutil.rmtree(home.path / "data" / "objects" / "reference-scores", ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
