"""``python -m polyreme_simulator``: ``--seed N`` replays one seed or some, ``--seeds N`` runs many."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time

from polyreme_simulator.anomalies import CLASSES
from polyreme_simulator.campaign import replay, run_campaign, table
from polyreme_simulator.run import simulate

SHOWN_MAX = 10


def main(arguments: list[str] | None = None) -> int:
    """Run the simulator; 0 when no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m polyreme_simulator", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="replay this seed, or these one after another")
    parser.add_argument("--anomaly", choices=CLASSES, help="the class of anomalies, whatever each seed says")
    parser.add_argument("--seeds", type=int, default=100, help="run this many seeds")
    parser.add_argument("--first", type=int, default=0, help="first of those seeds")
    parser.add_argument("--processes", type=int, default=2, help="processes to use")
    parser.add_argument("--until-violation", action="store_true", help="stop at the first seed that breaks a rule")
    parser.add_argument("--health", action="store_true", help="nodes have agents, and a NodeFaultPolicy is enforced")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        return _replay(options)
    return _many(options)


def _replay(options: argparse.Namespace) -> int:
    broken = 0
    for seed in options.seed:
        result = simulate(seed, anomaly=options.anomaly, health=options.health)
        broken += bool(result.violations)
        for violation in result.violations:
            sys.stdout.write(f"{violation}\n")
        sys.stdout.write(
            f"seed {seed}: trace {result.trace}, {result.changes} writes, {result.attempts} attempts, "
            f"{result.succeeded} jobs succeeded, {len(result.violations)} violations\n"
        )
        if broken and options.until_violation:
            break
    return 1 if broken else 0


def _many(options: argparse.Namespace) -> int:
    began_s = time.perf_counter()  # reported only; no decision depends on it
    seeds = range(options.first, options.first + options.seeds)
    kind = {"anomaly": options.anomaly, "health": options.health}
    campaign = run_campaign(seeds, processes=options.processes, until_violation=options.until_violation, **kind)
    sys.stdout.write(table(campaign) + "\n")
    for result in campaign.broken[:SHOWN_MAX]:
        sys.stdout.write(replay(result, **kind) + "\n")
    figures = {
        "seeds": campaign.seeds,
        "violations": len(campaign.broken),
        "attempts": campaign.attempts,
        "succeeded": campaign.succeeded,
        "wall_s": round(time.perf_counter() - began_s, 1),
    }
    ok = not campaign.broken
    sys.stdout.write(json.dumps({"name": "sim", "figures": figures, "bar": {"violations": 0}, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
