"""``make soak-rewards``: a run that learns from its own answers is killed at random points, and run again.

First a run learns to write a page's digit twice, which no answer of its data does: the mean reward of its last steps
must be above 0.9, within ``REWARDED_S_MAX`` on two cores. Then there are ``KILLS=`` kills, 10 by default; ``SEED=``
repeats their moments. Every loss and every reward must be those of an undisturbed run, bit for bit.
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
FORM_STEPS = 190
REWARDED_S_MAX = 360
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run; 0 when no kill changed anything."""
    kills, seed = int(os.environ.get("KILLS") or KILLS), int(os.environ.get("SEED") or 1)
    draw = random.Random(seed)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = PolyremeHome(Path(folder), variables={"PYTHONPATH": str(ROOT / "examples")})
        try:
            new_form = learned_form(home)
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
    figures |= new_form
    bar = {"different": 0, "reward_first": "< 0.2", "reward_last": "> 0.9", "rewarded_s": f"< {REWARDED_S_MAX}"}
    learns = new_form["reward_first"] < 0.2 and new_form["reward_last"] > 0.9
    ok = different == 0 and learns and new_form["rewarded_s"] < REWARDED_S_MAX
    print(json.dumps({"name": "soak-rewards", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def learned_form(home: PolyremeHome) -> dict[str, Any]:
    """Train on pages of one digit and of two, then reward a page's one digit written twice."""
    given = sample()
    first, second = (given["training"]["stages"][at] for at in (0, 1))
    given["data"]["sources"] = [
        {"name": "one", "dataset": "sample/digits-1", "weight": 1},
        {"name": "two", "dataset": "sample/digits-2", "weight": 1},
    ]
    second |= {"steps": FORM_STEPS, "weights": [{"source": "one", "weight": 1}]}
    second["objective"] |= {"reward": "twice:twice", "temperature": "1.3"}
    given["training"]["steps"] = first["steps"] + FORM_STEPS
    del given["evaluation"]
    ended = home.call("run", str(home.write_job("twice", **given)), wait_s=3 * REWARDED_S_MAX)
    assert ended.code == 0, ended.said
    history = home.records("twice").history
    rewards = [record.objective["reward"] for record in history[first["steps"] :]]
    return {
        "reward_first": round(sum(rewards[:10]) / 10, 3),
        "reward_last": round(sum(rewards[-10:]) / 10, 3),
        "rewarded_s": round(history[-1].ended_at_s - history[first["steps"]].ended_at_s),
    }


def sample() -> dict[str, Any]:
    """Return the spec of the sample."""
    given: dict[str, Any] = yaml.safe_load((ROOT / "manifests/samples/reward-words.yaml").read_text())["spec"]
    return given


def spec() -> dict[str, Any]:
    """The sample, shorter."""
    given = sample()
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
