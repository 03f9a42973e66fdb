"""Stragglers named in generated runs: names in quiet ones, and how many steps after a rank became slow.

Usage: run.py [--quiet 100] [--slowed 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.hang.run import percentile
from benchmarks.straggler.rules import RULES
from benchmarks.straggler.traces import Run, looks, quiet, slow_group, slowed

from polyreme_api.rank_state import RankState
from polyreme_launcher.protocol.straggler_evidence import SpeedWatch, look

STEPS_TO_NAME_MAX = 20
STEPS = 400
"""Steps of an attempt; quiet runs have two, as if they were restarted."""
SLOW_STEPS = 60
"""Steps in which a slow rank is looked for."""

Rule = Callable[[Run, Iterator[tuple[int, Sequence[RankState]]]], Iterator[tuple[int, tuple[int, ...]]]]
"""Yields steps in which some ranks are named, with these."""


def ours(run: Run, seen: Iterator[tuple[int, Sequence[RankState]]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Run the detector."""
    watch = SpeedWatch()
    for step, states in seen:
        watch = look(watch, states, world=run.ranks, pp=run.pp, blocks=run.blocks)
        for each in watch.stragglers:
            yield step, each.ranks


def false_names(rule: Rule, seeds: Sequence[int]) -> list[int]:
    """Return the seeds of quiet runs in which a rule names one."""
    attempts = ((seed, quiet(seed * 2 + attempt)) for seed in seeds for attempt in range(2))
    return sorted({seed for seed, run in attempts if next(rule(run, looks(run, STEPS)), None) is not None})


def steps_to_name(rule: Rule, runs: Sequence[Run]) -> tuple[list[float], list[int]]:
    """Return how many steps each slow rank or group was slow before it was named, and the seeds with a wrong name."""
    delays, wrong = [], []
    for run in runs:
        size = run.ep if run.slow_group >= 0 else 1
        first = run.slow_group * size if run.slow_group >= 0 else run.slow_rank
        guilty, delay = tuple(range(first, first + size)), math.inf
        for step, ranks in rule(run, looks(run, run.slow_from + SLOW_STEPS)):
            if ranks != guilty:
                wrong.append(run.seed)
                break
            delay = min(delay, step + 1 - run.slow_from)
        delays.append(delay)
    return delays, wrong


def main() -> int:
    """Count, print one line of JSON; 0 when all bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", type=int, default=100)
    parser.add_argument("--slowed", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.quiet)
    chosen = range(options.seed, options.seed + options.slowed)
    false = {name: false_names(rule, seeds) for name, rule in {"ours": ours, **RULES}.items()}
    delays, wrong = steps_to_name(ours, [slowed(seed) for seed in chosen])
    of_groups, wrong_groups = steps_to_name(ours, [slow_group(seed) for seed in chosen])
    figures = {
        "steps_to_name": percentile(delays, 0.99),
        "steps_to_name_worst": max(delays),
        "steps_to_name_p50": sorted(delays)[len(delays) // 2],
        "false_names": len(false["ours"]),
        "wrong_names": len(wrong) + len(wrong_groups),
        "steps_to_name_group": percentile(of_groups, 0.99),
        **{f"{name}_false_names": len(found) for name, found in false.items() if name != "ours"},
    }
    planted = all(false[name] for name in RULES)
    ok = figures["steps_to_name"] <= STEPS_TO_NAME_MAX and not false["ours"] and not figures["wrong_names"] and planted
    ok = ok and figures["steps_to_name_group"] <= STEPS_TO_NAME_MAX
    bar = {"steps_to_name": f"<= {STEPS_TO_NAME_MAX}", "false_names": "== 0", "wrong_names": "== 0"}
    bar["steps_to_name_group"] = f"<= {STEPS_TO_NAME_MAX}"
    late = [run for run, delay in zip(chosen, delays, strict=True) if delay > STEPS_TO_NAME_MAX]
    sys.stderr.write(f"false {false['ours'][:9]}, wrong {wrong[:9]} {wrong_groups[:9]}, late {late[:9]}\n")
    sys.stdout.write(json.dumps({"name": "straggler", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
