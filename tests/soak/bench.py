"""``make soak-bench``: every benchmark once, in its smallest form, so that one that no longer starts is noticed.

A benchmark counts as run when it ends with its line of JSON, whatever its bars say: a smoke form measures nothing.
One that ends with code 7, since a server, a compiler or a peer is not on this machine, is listed under ``not_run``;
`make servers` gets what most of them need. Figures: ``failed``, which has to be 0, and the names of each kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from polyreme_api.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
"""Longest time of one benchmark."""
LINES_SHOWN_MAX = 20
SMOKE: dict[str, str] = {
    "agent": "--seconds 2 --rounds 1",
    "augment": "--rounds 1",
    "checkpoint": "--runs 1",
    "console": "--runs 200 --parameters 10 --rounds 2 --looks 1 --steps 5000",
    "gpu": "--rehearse --ours-only",
    "generate": "--rounds 1 --prompts 4 --longest 24",
    "hang": "--traces 20",
    "health": "--nodes 40 --burst 4 --many 8 --runs 1",
    "images": "--rounds 1",
    "launch": "--pods 40",
    "loader": "--samples 128 --rounds 1 --peers webdataset",
    "loader-origin": "--images 64",
    "logs": "--rounds 1 --steps 5",
    "memory": "--nodes 200 --pods 200",
    "metadata": "--rows 20000",
    "overhead": "--rounds 1 --steps 1",
    "overlap": "--blocks 1 --rounds 1",
    "packing": "--steps 8 --seeds 1",
    "pipeline": "--samples 64 --rounds 1",
    "placement": "--decisions 2 --runs 1",
    "planner": "--layouts 3 --steps 1",
    "preemption": "--decisions 2 --runs 1",
    "preference": "--rounds 1 --steps 1 --pairs 1 --prompt 64 --answer 16",
    "queue": "--jobs 100",
    "rank-order": "--runs 1",
    "reason": "--rounds 1 --others 0",
    "recompute": "--images 64 --rounds 1",
    "recovery": "--workers 4 --gang 0 --runs 1",
    "serve": "--clients 2 --requests 2 --longest 16",
    "serving-plan": "--batch 1",
    "spike": "--curves 1 --steps 2000",
    "stage-split": "--simulations 50",
    "step-log": "--steps 20000",
    "straggler": "--quiet 2 --slowed 2",
    "throughput-cpu": "--rounds 1 --steps 1",
    "windtunnel": "--faults 2000 --trainings 2",
}
"""The smallest form of every benchmark."""


def main() -> int:
    """Run them one after another; 0 when none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(SMOKE), default=sorted(SMOKE))
    options = parser.parse_args()
    ended: dict[str, list[str]] = {"ran": [], "not_run": [], "failed": []}
    for name in options.only:
        how = run(name)
        ended[how].append(name)
        sys.stderr.write(f"{name}: {how}\n")
    figures = {"failed": len(ended["failed"]), **{f"names_{how}": names for how, names in ended.items()}}
    good = not ended["failed"]
    sys.stdout.write(
        json.dumps({"name": "soak-bench", "figures": figures, "bar": {"failed": "== 0"}, "ok": good}) + "\n"
    )
    return 0 if good else 1


def run(name: str) -> str:
    """Run one benchmark; return how it ended: ``ran``, ``not_run`` or ``failed``."""
    command = [sys.executable, str(ROOT / "benchmarks" / name.replace("-", "_") / "run.py"), *SMOKE[name].split()]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{name}: no end within {LIMIT_S:.0f} s\n")
        return "failed"
    if is_result(done.stdout):
        return "ran"
    said = "\n".join((done.stdout + done.stderr).splitlines()[-LINES_SHOWN_MAX:])
    sys.stderr.write(f"{name}: exit code {done.returncode}\n{said}\n")
    return "not_run" if done.returncode == ExitCode.ENVIRONMENT else "failed"


def is_result(output: str) -> bool:
    """Tell whether the output ends with a benchmark's line of JSON."""
    try:
        value = json.loads(output.rstrip().rpartition("\n")[2])
    except ValueError:
        return False
    return isinstance(value, dict) and {"name", "figures", "ok"} <= value.keys()


if __name__ == "__main__":
    sys.exit(main())
