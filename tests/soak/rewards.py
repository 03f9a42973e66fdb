"""``make soak-rewards``: a run that learns from its own answers is killed at random points, and run again.

``KILLS=`` kills, 10 by default; ``SEED=`` repeats their moments. Every loss and every reward must be those of an
undisturbed run, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.polyreme_home import PolyremeHome, unless_gone

KILLS = 10
READ, REWARD = 80, 20
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run; 0 when no kill changed anything."""
    kills, seed = int(os.environ.get("KILLS") or KILLS), int(os.environ.get("SEED") or 1)
    draw = random.Random(seed)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = PolyremeHome(Path(folder), variables={"PYTHONPATH": str(ROOT / "examples")})
        try:
            ended = home.call("run", str(home.write_job("undisturbed", **spec())))
            assert ended.code == 0, ended.said
            expected = learned(home, "undisturbed")
            different = 0
            for number in range(kills):
                step = draw.randint(READ, READ + REWARD - 2)
                killed(home, f"killed-{number}", step, wait_s=draw.uniform(0, 0.3))
                different += learned(home, f"killed-{number}") != expected
                print(f"kill {number + 1} of {kills}: after step {step}", file=sys.stderr)
        finally:
            home.close()
    figures = {"kills": kills, "different": different, "seed": seed, "wall_s": round(time.monotonic() - begun_s)}
    ok = different == 0
    print(json.dumps({"name": "soak-rewards", "figures": figures, "bar": {"different": 0}, "ok": ok}))
    return 0 if ok else 1


def spec() -> dict[str, Any]:
    """The sample, shorter."""
    given: dict[str, Any] = yaml.safe_load((ROOT / "manifests/samples/reward-words.yaml").read_text())["spec"]
    for stage, steps in zip(given["training"]["stages"], (READ, REWARD), strict=True):
        stage["steps"] = steps
    given["training"]["stages"][0]["decaySteps"] = READ // 2
    given["training"]["steps"] = READ + REWARD
    del given["evaluation"]
    return {**given, "checkpoint": {"everySteps": 7, "keep": 3}}


def killed(home: PolyremeHome, name: str, step: int, *, wait_s: float) -> None:
    """Kill a run after a step, and run it to its end."""
    job = home.write_job(name, **spec())
    running = home.start(job)
    running.until(lambda: running.step(1) >= step, "it trains")
    time.sleep(wait_s)
    unless_gone(running.kill_all)
    ended = home.call("run", str(job))
    assert ended.code == 0, ended.said


def learned(home: PolyremeHome, name: str) -> list[tuple[float, dict[str, float]]]:
    """Losses and what was measured, of the steps that count."""
    return [(record.loss, dict(record.objective)) for record in home.records(name).history]


if __name__ == "__main__":
    raise SystemExit(main())
