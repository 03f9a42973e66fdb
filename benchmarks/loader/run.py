"""The loader against five peers: the same photographs, the same work, fresh processes, from a disk and from S3.

Usage: run.py [--part PART ...] [--samples 512] [--rounds 1] [--workers 2] [--peers NAME ...] [--peer-resizer pillow]
              [--installed FOLDER] [--folder DIRECTORY]
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.loader import contenders, growth, prepare, summary, work
from benchmarks.loader.contenders import PEERS, Contenders

from tools.services.services import shared

SAMPLES, ROUNDS = 512, 1
"""Fewer samples would come again inside the first window of packs, and then from the loader's cache."""
STEPS_MIN = 6
FULL_SAMPLES = {"photos": 256, "small": 128, "text": 128}
FULL_STEPS, FULL_PACKS_PER_STEP, FULL_TOKENS = 12, 4, 8_192
PARTS = ("warm", "cold", "full", "growth", "resume")
BARS: dict[str, tuple[str, float]] = {
    "cold_peer_ratio": (">=", 1.5),
    "warm_peer_ratio": (">=", 1.8),
    "warm_same_resizer_ratio": (">=", 1.0),
    "engine_first_batch_lag_s": ("<=", 0.15),
    "cpu_peer_ratio": ("<=", 0.6),
    "pss_over_import_mib": ("<=", 150.0),
    "resume_first_batch_s": ("<=", 0.2),
    "full_peer_ratio": (">", 1.0),
    "growth_sources_x_threads_mib": ("<=", 5.0),
    "growth_sources_x_ranks_mib": ("<=", 5.0),
}
HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": float.__ge__,
    "<=": float.__le__,
    ">": float.__gt__,
}


def main() -> int:
    """Run and print one line of JSON; 0 when the bars of the parts that ran are met."""
    options = parsed()
    contenders.install_peers(options.installed)
    figures: dict[str, Any] = {"samples": options.samples, "workers": options.workers, "rounds": options.rounds}
    figures |= {"peer_resizer": options.peer_resizer, "peers_left_out": sorted(set(PEERS) - set(options.peers))}
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-", dir=options.folder) as made:
        if {"warm", "cold", "resume"} & set(options.part):
            figures |= of_photos(Path(made, "photos"), options)
        if "full" in options.part:
            figures |= of_mixture(Path(made, "mixture"), options)
        if "growth" in options.part:
            figures |= growth.measure(Path(made, "growth"))
    bars = {name: bar for name, bar in BARS.items() if name in figures}
    missed = [name for name, (kind, bar) in bars.items() if not HOLDS[kind](float(figures[name]), bar)]
    shown = {name: f"{kind} {bar:g}" for name, (kind, bar) in bars.items()}
    found = {"name": "bench-loader", "figures": figures, "bar": shown, "missed": missed, "ok": not missed}
    print(json.dumps(found))
    return 1 if missed else 0


def parsed() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="What is measured; default: all.")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="Threads, or processes.")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="Peers that take part.")
    parser.add_argument(
        "--peer-resizer",
        choices=work.RESIZERS,
        default=work.PILLOW,
        help="How peers make pixels: by Pillow, as their users do, or by our function.",
    )
    parser.add_argument(
        "--installed", type=Path, default=contenders.INSTALLED, help="Folder of the peers; made if there is none."
    )
    parser.add_argument("--folder", type=Path, help="Where the data are made; a disk, not memory.")
    return parser.parse_args()


def of_photos(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure what one source of photographs is needed for: warm, cold, resume."""
    folder.mkdir()
    job = prepare.job_of(prepare.ONE_SOURCE, sequence_tokens=2048, packs_per_step=8, augment=False)
    steps = prepare.prepare(folder, {"photos": options.samples}, job)
    if steps < STEPS_MIN:
        raise SystemExit(
            f"--samples {options.samples} is too few: a sample comes again after {steps} steps, expected at least "
            f"{STEPS_MIN}; {SAMPLES} are enough"
        )
    made = Contenders(folder, options, sources=prepare.ONE_SOURCE, steps=steps)
    figures: dict[str, Any] = {}
    if {"warm", "cold"} & set(options.part):
        made.write()
    if "warm" in options.part:
        rounds = [contenders.one_round(made.warm()) for _ in range(options.rounds)]
        figures |= summary.of_warm(rounds, options.peers)
    if "cold" in options.part:
        with shared(folder / "services", ("s3",)) as variables:
            os.environ.update(variables)
            made.upload(variables["POLYREME_OBJECTS_URL"])
            rounds = [contenders.one_round(made.cold(variables["POLYREME_OBJECTS_URL"])) for _ in range(options.rounds)]
        figures |= summary.of_cold(rounds, options.peers)
    if "resume" in options.part:
        found = contenders.one_round({"ours_resume": made.resume()})
        figures["resume_first_batch_s"] = round(found["ours_resume"]["resume_first_batch_s"], 3)
    return figures


def of_mixture(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure three sources, packs of 8k tokens, random windows and colors."""
    folder.mkdir()
    job = prepare.job_of(prepare.SOURCES, sequence_tokens=FULL_TOKENS, packs_per_step=FULL_PACKS_PER_STEP, augment=True)
    prepare.prepare(folder, FULL_SAMPLES, job)
    made = Contenders(folder, options, sources=prepare.SOURCES, steps=FULL_STEPS)
    made.write()
    packs = FULL_STEPS * FULL_PACKS_PER_STEP
    rounds = [contenders.one_round(made.full(packs, FULL_TOKENS)) for _ in range(options.rounds)]
    return summary.of_full(rounds, options.peers)


if __name__ == "__main__":
    sys.exit(main())
