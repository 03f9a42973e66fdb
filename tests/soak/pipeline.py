"""``make soak-pipeline``: the data pipeline on real servers, all of whose processes are killed again and again.

``SAMPLES=`` samples, 45,000 by default (20,000 take six minutes, and memory is compared at minute ten), one in a
hundred of them bad; ``KILLS=`` kills, 40 by default, as many of workers, the publisher, the broker, the S3 server and
PostgreSQL. Connections are cut and requests refused with 503. Then each server is away for 20 s, ``MOMENTS=`` times (2
by default) in a run of 2 and in one of 12 workers, and none of these may end; ``KILLS=0`` does only that. What comes of
it must be, bit for bit, what one undisturbed process makes.
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

from tests.services.pipeline_faults import KINDS, SERVERS, Faults, Outcome, plant, undisturbed

SAMPLES, KILLS = 45_000, 40
BAD_SHARE = 100
KILLS_EACH_MIN = 5
LIMIT_S = 3 * 3600.0
AWAY_S, MOMENTS, AWAY_WORKERS = 20.0, 2, (2, 12)
AWAY_SAMPLES = 500
"""Samples for each outage."""
AWAY_LIMIT_S = 1800.0
GROWTH_BAR = 1.05
EARLY_S, LATE_S, WINDOW_S = 180.0, 600.0, 60.0


def main() -> int:
    """Run; 0 when nothing is lost, doubled or different."""
    samples, kills = int(os.environ.get("SAMPLES") or SAMPLES), int(os.environ.get("KILLS") or KILLS)
    moments, seed = int(os.environ.get("MOMENTS") or MOMENTS), int(os.environ.get("SEED") or 1)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    figures: dict[str, Any] = {}
    bar: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="polyreme-soak-", dir=os.environ.get("TMPDIR") or "/var/tmp") as name:
        if kills:
            figures, bar = killed(Path(name), samples, kills, seed)
        figures |= outages(Path(name), moments, seed)
    bar |= {"away_lost": 0, "away_doubled": 0, "away_different": 0}
    ok = all(figures[name] == wanted for name, wanted in bar.items() if name != "pss_growth_ratio")
    # A short run has no minute ten; the whole one must.
    growth_ratio = figures.get("pss_growth_ratio")
    ok = ok and (samples < SAMPLES or not kills if growth_ratio is None else growth_ratio <= GROWTH_BAR)
    ok = ok and (kills < KILLS or min(figures["kills"].values()) >= KILLS_EACH_MIN)
    sys.stdout.write(json.dumps({"name": "soak-pipeline", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def killed(folder: Path, samples: int, kills: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kill every process again and again; return figures and their bar."""
    each = {kind: kills // len(KINDS) + (at < kills % len(KINDS)) for at, kind in enumerate(KINDS)}
    source, bad = plant(folder / "set", samples, samples // BAD_SHARE)
    began_s = time.monotonic()
    expected = undisturbed(folder / "alone", source)
    alone_s = time.monotonic() - began_s
    with Faults(folder / "servers", kills=each, seed=seed) as faults:
        outcome = faults.run(source, samples, limit_s=LIMIT_S)
    figures = {"samples": samples, "undisturbed_s": round(alone_s, 1), **verdicts(expected, outcome, bad)}
    bar = {"lost": 0, "doubled": 0, "manifest_identical": 1, "wrong_dead_letters": 0, "made_again": 0}
    return figures, {**bar, "pss_growth_ratio": GROWTH_BAR}


def outages(folder: Path, moments: int, seed: int) -> dict[str, Any]:
    """Let each server be away at some moments of a run, half of whose workers are in a process of their own."""
    samples = AWAY_SAMPLES * len(SERVERS) * moments
    source, bad = plant(folder / "away", samples, samples // BAD_SHARE)
    expected = undisturbed(folder / "away-alone", source)
    found: list[dict[str, Any]] = []
    for workers in AWAY_WORKERS:
        each = dict.fromkeys(SERVERS, moments)
        place = folder / f"servers-{workers}"
        with Faults(place, kills=each, seed=seed, away_s=AWAY_S, workers=1, threads=workers // 2) as faults:
            found.append(verdicts(expected, faults.run(source, samples, limit_s=AWAY_LIMIT_S), bad))
    return {
        "away_samples": samples,
        "away_outages": sum(sum(one["kills"].values()) for one in found),
        "away_lost": sum(one["lost"] for one in found),
        "away_doubled": sum(one["doubled"] for one in found),
        "away_different": sum(not one["manifest_identical"] or one["wrong_dead_letters"] > 0 for one in found),
        **{f"away_{workers}_workers_s": one["wall_s"] for workers, one in zip(AWAY_WORKERS, found, strict=True)},
    }


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
