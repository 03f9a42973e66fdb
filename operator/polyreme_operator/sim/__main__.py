"""``python -m polyreme_operator.sim``: ``--seed N`` replays one seed, ``--seeds N`` runs many."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import logging
import sys
import time
from collections import Counter

from polyreme_operator.sim.run import Result, simulate

SHOWN_MAX = 10
PLANTED_BUGS_BAR = 6


def main(arguments: list[str] | None = None) -> int:
    """Run the simulator; 0 when no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m polyreme_operator.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed, with its log")
    parser.add_argument("--seeds", type=int, default=100, help="run this many seeds")
    parser.add_argument("--first", type=int, default=0, help="first of those seeds")
    parser.add_argument("--processes", type=int, default=2, help="processes to use")
    parser.add_argument("--until-violation", action="store_true", help="stop at the first seed that breaks a rule")
    parser.add_argument("--planted-bugs-caught", type=int, default=None, help="figure of tests/sim, for the last line")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        return _replay(options.seed)
    return _many(options)


def _replay(seed: int) -> int:
    result = simulate(seed)
    for violation in result.violations:
        sys.stdout.write(f"{violation}\n")
    sys.stdout.write(
        f"seed {seed}: trace {result.trace}, {result.changes} writes, {result.attempts} attempts, "
        f"{result.succeeded} jobs succeeded, {len(result.violations)} violations\n"
    )
    return 1 if result.violations else 0


def _many(options: argparse.Namespace) -> int:
    began_s = time.perf_counter()  # how long it took is told, never decided by
    reached: Counter[tuple[str, str]] = Counter()
    bad: list[Result] = []
    attempts = succeeded = done = 0
    seeds = range(options.first, options.first + options.seeds)
    with concurrent.futures.ProcessPoolExecutor(options.processes, initializer=_quiet) as pool:
        for result in pool.map(simulate, seeds, chunksize=4):
            done += 1
            reached.update(result.reached)
            attempts += result.attempts
            succeeded += result.succeeded
            if result.violations:
                bad.append(result)
                if options.until_violation:
                    pool.shutdown(cancel_futures=True)
                    break
    for (fault, point), count in sorted(reached.items()):
        sys.stdout.write(f"{count:8d}  {fault:18s} {point}\n")
    for result in bad[:SHOWN_MAX]:
        sys.stdout.write(f"seed {result.seed}: {result.violations[0]}\n")
        sys.stdout.write(f"    replay: python -m polyreme_operator.sim --seed {result.seed}\n")
    figures: dict[str, float | int] = {"seeds": done, "violations": len(bad)}
    bar: dict[str, float | int] = {"violations": 0}
    if options.planted_bugs_caught is not None:
        figures["planted_bugs_caught"] = options.planted_bugs_caught
        bar["planted_bugs_caught"] = PLANTED_BUGS_BAR
    figures |= {"attempts": attempts, "succeeded": succeeded, "wall_s": round(time.perf_counter() - began_s, 1)}
    caught = options.planted_bugs_caught is None or options.planted_bugs_caught >= PLANTED_BUGS_BAR
    ok = not bad and caught
    sys.stdout.write(json.dumps({"name": "sim", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


if __name__ == "__main__":
    raise SystemExit(main())
