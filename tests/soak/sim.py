"""``make soak-sim``: many seeds of the simulation (``SEEDS=``, ``FIRST=``), and every planted bug.

Seeds go from ``FIRST`` on, by default behind those that the tests run. Nothing is resumed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme_simulator.campaign import replay, run_campaign, table
from tests.simulator.planted_bugs import CAUGHT_WITHIN, first_caught, plant

SEEDS = 2_000
FIRST = 1000
TELL_EVERY_S = 5.0
SHOWN_MAX = 20


def main() -> int:
    """Run them; 0 when no rule was broken and every bug was seen."""
    began_s = time.perf_counter()
    seeds, first = int(os.environ.get("SEEDS") or SEEDS), int(os.environ.get("FIRST") or FIRST)
    processes = os.cpu_count() or 1
    caught = _caught(processes)
    campaign = run_campaign(range(first, first + seeds), processes=processes, on_done=_Progress(seeds))
    sys.stdout.write(table(campaign) + "\n")
    for result in campaign.broken[:SHOWN_MAX]:
        sys.stdout.write(replay(result) + "\n")
    figures = {
        "seeds": campaign.seeds,
        "violations": len(campaign.broken),
        "unreached": len(campaign.unreached),
        "planted_bugs_caught": caught,
        "attempts": campaign.attempts,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    bar = {"violations": 0, "unreached": 0, "planted_bugs_caught": len(CAUGHT_WITHIN)}
    ok = not campaign.broken and not campaign.unreached and caught == len(CAUGHT_WITHIN)
    sys.stdout.write(json.dumps({"name": "sim", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


class _Progress:
    """A line every few seconds."""

    def __init__(self, seeds: int) -> None:
        self._seeds, self._began_s, self._told_s = seeds, time.perf_counter(), time.perf_counter()

    def __call__(self, done: int, broken: int) -> None:
        """Tell, if it is time to."""
        now_s = time.perf_counter()
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        left_s = (now_s - self._began_s) / done * (self._seeds - done)
        sys.stderr.write(f"{done} of {self._seeds} seeds, {broken} broken, {left_s:.0f} s to go\n")


def _caught(processes: int) -> int:
    caught = 0
    for bug in sorted(CAUGHT_WITHIN):
        with tempfile.TemporaryDirectory() as directory:
            plant(bug, Path(directory))
            seeds = first_caught(bug, Path(directory), processes=processes)
        caught += seeds is not None
        sys.stderr.write(f"{bug}: {'not seen' if seeds is None else f'seen by seed {seeds - 1}'}\n")
    return caught


if __name__ == "__main__":
    raise SystemExit(main())
