"""The GPU suite, one benchmark after the other, each in a process of its own; README.md says what each measures.

Usage: run.py [--only G4 ...] [--rehearse] [--ours-only] [--quick]

Ends with 0 when every bar is met, 1 when one is not or a benchmark failed, 7 when there is no CUDA device.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from polyreme_api.exit_codes import ExitCode

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.gpu.bounded import ROOT, run_bounded

FOLDER = Path(__file__).parent
FILES = {path.name.partition("_")[0].upper(): path for path in sorted(FOLDER.glob("g[0-9]_*.py"))}
LIMIT_S = 1800.0
"""Longest run of one benchmark: compilers of peers take minutes."""


def main() -> int:
    """Run what is asked for; each prints its own lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", type=str.upper, choices=sorted(FILES), default=sorted(FILES))
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a processor")
    parser.add_argument("--ours-only", action="store_true", help="leave peers out")
    parser.add_argument("--quick", action="store_true", help="fewer runs of each: a first look")
    options = parser.parse_args()
    flags = {"--rehearse": options.rehearse, "--ours-only": options.ours_only, "--quick": options.quick}
    passed = [flag for flag, given in flags.items() if given]
    # Fragments of a model that is gone must not fail the next one.
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    missed: list[str] = []
    for name in options.only:
        code = run_bounded([sys.executable, str(FILES[name]), *passed], limit_s=LIMIT_S, environment=environment)
        if code is None:
            sys.stderr.write(f"{name} was killed: it ran for longer than {LIMIT_S:.0f} s\n")
        if code == ExitCode.ENVIRONMENT:
            return code
        if code != 0:
            missed.append(name)
    if missed:
        sys.stderr.write(f"bars not met, or benchmarks failed: {', '.join(missed)}\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
