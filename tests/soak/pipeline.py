"""``make soak-pipeline``: the data pipeline on real servers, all of whose processes are killed again and again.

``SAMPLES=`` samples, 45,000 unless told (20,000 take six minutes, and memory is compared at minute ten), one in a
hundred of them bad; ``KILLS=`` kills, 40 unless told, as many of workers, the publisher, the broker, the S3 server and
PostgreSQL. Connections are cut and requests refused with 503.
What comes of it must be, bit for bit, what one undisturbed process makes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.services.pipeline_faults import KINDS, Faults, Outcome, plant, undisturbed

SAMPLES, KILLS = 45_000, 40
BAD_SHARE = 100
KILLS_EACH_MIN = 5
LIMIT_S = 3 * 3600.0
GROWTH_BAR = 1.05
EARLY_S, LATE_S, WINDOW_S = 180.0, 600.0, 60.0


def main() -> int:
    """Run; 0 when nothing is lost, doubled or different."""
    samples, kills = int(os.environ.get("SAMPLES") or SAMPLES), int(os.environ.get("KILLS") or KILLS)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    each = {kind: kills // len(KINDS) + (at < kills % len(KINDS)) for at, kind in enumerate(KINDS)}
    with tempfile.TemporaryDirectory(prefix="polyreme-soak-", dir=os.environ.get("TMPDIR") or "/var/tmp") as name:
        folder = Path(name)
        source, bad = plant(folder / "set", samples, samples // BAD_SHARE)
        began_s = time.monotonic()
        expected = undisturbed(folder / "alone", source)
        alone_s = time.monotonic() - began_s
        with Faults(folder / "servers", kills=each, seed=int(os.environ.get("SEED") or 1)) as faults:
            outcome = faults.run(source, samples, limit_s=LIMIT_S)
    figures = {"samples": samples, "undisturbed_s": round(alone_s, 1), **verdicts(expected, outcome, bad)}
    bar: dict[str, Any] = {"lost": 0, "doubled": 0, "manifest_identical": 1, "wrong_dead_letters": 0}
    bar |= {"made_again": 0, "pss_growth_ratio": GROWTH_BAR}
    ok = all(figures[name] == wanted for name, wanted in bar.items() if name != "pss_growth_ratio")
    # A short run has no minute ten; the whole one must.
    growth_ratio = figures["pss_growth_ratio"]
    ok = ok and (samples < SAMPLES if growth_ratio is None else growth_ratio <= GROWTH_BAR)
    ok = ok and (kills < KILLS or min(outcome.kills.values()) >= KILLS_EACH_MIN)
    sys.stdout.write(json.dumps({"name": "soak-pipeline", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def verdicts(expected: dict[str, Any], outcome: Outcome, bad: list[str]) -> dict[str, Any]:
    """Compare a disturbed run with the undisturbed one, and with what was planted."""
    facts = outcome.facts
    letters = [name for name, _, _ in facts["letters"]]
    return {
        "lost": max(0, expected["samples"] - facts["samples"]),
        "doubled": max(0, facts["samples"] - expected["samples"]) + len(letters) - len(set(letters)),
        "manifest_identical": int(facts["manifest"] == expected["manifest"] == outcome.again["manifest"]),
        "wrong_dead_letters": len(set(letters) ^ set(bad)) + int(facts["letters"] != expected["letters"]),
        "dead_letters": len(letters),
        "made_again": sum(outcome.again["made"].values()),
        "kills": outcome.kills,
        "cut_connections": outcome.cuts,
        "answers_503": outcome.refusals,
        "process_starts": outcome.starts,
        "pss_growth_ratio": growth(outcome.pss_bytes),
        "wall_s": round(outcome.wall_s, 1),
    }


def growth(measured: list[tuple[float, int]]) -> float | None:
    """Return the memory of all processes in minute 10 over that in minute 3; None for a shorter run."""
    windows = [
        [size for at_s, size in measured if start_s <= at_s < start_s + WINDOW_S] for start_s in (EARLY_S, LATE_S)
    ]
    return round(statistics.median(windows[1]) / statistics.median(windows[0]), 3) if all(windows) else None


if __name__ == "__main__":
    raise SystemExit(main())
