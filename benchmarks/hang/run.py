"""Hangs found in generated traces: restarts without a hang, hangs that were missed, and how long after they begin.

Usage: run.py [--traces 300] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.hang.rules import dlrover, nvrx, relation_alone, time_alone
from benchmarks.hang.traces import Trace, looks, trace

from polyreme_launcher.protocol.hang_evidence import HangLimits, HangWatch, look

LOOK_S = 2.0
AFTER_S = 3600.0
"""How long after the beginning of a hang it is looked for."""
DEVICES = 8
DELAY_RATIO_MAX = 0.1


def found_at(found: Trace) -> tuple[float | None, tuple[int, ...], bool]:
    """Run the detector; return when it confirms a hang, whom it accuses, and whether it was armed at all."""
    watch, armed = HangWatch(), False
    for now_s, states in looks(found, LOOK_S, AFTER_S):
        watch = look(watch, states or (), now_s, world=found.ranks, limits=HangLimits(), devices=DEVICES, pp=found.pp)
        armed |= watch.armed
        if watch.stall is not None and watch.stall.confirmed:
            return now_s, watch.stall.suspects, armed
    return None, (), armed


class Count:
    """What one rule does on all traces."""

    def __init__(self) -> None:
        self.false_kills: list[int] = []
        self.missed: list[int] = []
        self.delays_s: list[float] = []

    def add(self, found: Trace, at_s: float | None) -> None:
        """Take when the rule restarts in a trace."""
        if at_s is not None and at_s < found.hangs_at_s:
            self.false_kills.append(found.seed)
        elif found.hang is not None and at_s is None:
            self.missed.append(found.seed)
        elif at_s is not None:
            self.delays_s.append(at_s - found.hangs_at_s)

    def figures(self) -> dict[str, float]:
        """Return what is reported."""
        return {
            "false_kills": len(self.false_kills),
            "missed": len(self.missed),
            "delay_p50": round(percentile(self.delays_s, 0.5), 1),
            "delay_p99": round(percentile(self.delays_s, 0.99), 1),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed; infinity of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.inf


def main() -> int:
    """Count, print one line of JSON; 0 when all bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = {name: Count() for name in ("ours", "dlrover", "nvrx", "time_alone", "relation_alone")}
    named = unarmed = hangs = 0
    for seed in range(options.seed, options.seed + options.traces):
        found = trace(seed)
        at_s, suspects, armed = found_at(found)
        if found.recorder_off:
            # These ranks are out of sight: the detector must say that it is blind, and restart nothing.
            unarmed += not armed and at_s is None
            continue
        counts["ours"].add(found, at_s)
        counts["dlrover"].add(found, dlrover(found))
        counts["nvrx"].add(found, nvrx(found))
        counts["time_alone"].add(found, time_alone(looks(found, LOOK_S, AFTER_S)))
        counts["relation_alone"].add(found, relation_alone(looks(found, LOOK_S, AFTER_S)))
        if found.hang is not None:
            hangs += 1
            blames_one = found.hang.shows not in {"all wait", "all idle"}
            named += suspects == ((found.hang.culprit,) if blames_one else ())
    return report(counts, named=named, hangs=hangs, unarmed=unarmed)


def report(counts: dict[str, Count], *, named: int, hangs: int, unarmed: int) -> int:
    """Print figures and bars."""
    ours = counts["ours"].figures()
    peers = {name: counts[name].figures() for name in ("dlrover", "nvrx")}
    fair = [peer["delay_p99"] for peer in peers.values() if peer["false_kills"] <= ours["false_kills"]]
    better_s = min(fair, default=math.inf)
    figures = {
        **ours,
        "delay_ratio": round(ours["delay_p99"] / better_s, 4),
        "named_share": round(named / max(1, hangs), 4),
        "hangs": hangs,
        "blind_and_said_so": unarmed,
        **{
            f"{name}_{key}": value
            for name, each in counts.items()
            if name != "ours"
            for key, value in each.figures().items()
        },
    }
    planted = all(counts[name].false_kills for name in ("time_alone", "relation_alone"))
    ok = not ours["false_kills"] and not ours["missed"] and figures["delay_ratio"] <= DELAY_RATIO_MAX and planted
    bar = {"false_kills": "== 0", "missed": "== 0", "delay_ratio": f"<= {DELAY_RATIO_MAX}", "named_share": ">= 0.99"}
    ok = ok and figures["named_share"] >= 0.99
    for name, count in counts.items():
        sys.stderr.write(f"{name}: {count.figures()} false in {count.false_kills[:5]}, missed {count.missed[:5]}\n")
    sys.stdout.write(json.dumps({"name": "hang", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
