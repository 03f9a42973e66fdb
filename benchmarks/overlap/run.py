"""Training beside processing against training after it: one core each, the same data, order and losses.

Usage: run.py [--blocks 12] [--rounds 1] [--cores 0 1] [--steps N] [--folder DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from polyreme_api.job import parse_job
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub import hub
from polyreme_datahub.chat_format import OWN_TEMPLATE
from polyreme_datahub.loader import job_packs
from polyreme_datahub.objects import open_store
from polyreme_datahub.runner.flow import GROUP
from polyreme_datahub.sources.digits import QUESTION, describe
from polyreme_datahub.tokens import train_tokenizer
from polyreme_launcher.rank_processes import ALLOCATOR

SPEEDUP_MIN = 1.5
BLOCKS, ROUNDS = 12, 1
DIGITS, SEQUENCE_TOKENS, PACKS_PER_STEP = 6, 256, 16
"""With pages of six digits an epoch of training takes about as long as processing."""
TRIAL_STEPS = 8
"""Steps by which the time of a step is measured, so that training is made as long as processing."""
LIMIT_S = 900.0
SPEC, SECONDS = "spec.json", "seconds"


def main() -> int:
    """Measure, and print one line of JSON; 0 when the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--steps", type=int, help="of the training; as many as take the time of processing")
    parser.add_argument("--folder", type=Path, help="where the data are made")
    parser.add_argument("--do", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        what, folder, core = options.do
        # Before anything that starts a thread or a child: they inherit it.
        os.sched_setaffinity(0, {int(core)})
        print(json.dumps({"process": process, "train": train}[what](Path(folder))))
        return 0
    if len(options.cores) < 2:
        print("two cores are needed: processing has one, training the other", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-", dir=options.folder) as made:
        rounds = [one_round(Path(made) / f"{number}", options) for number in range(options.rounds)]
    figures = {name: round(statistics.median(of[name] for of in rounds), 3) for name in rounds[0]}
    ok = figures["overlap_speedup_ratio"] >= SPEEDUP_MIN
    bar = {"overlap_speedup_ratio": SPEEDUP_MIN}
    print(json.dumps({"name": "bench-overlap", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def one_round(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Process, then train; then both at once, on data of their own."""
    first, second = options.cores
    after, beside = folder / "after", folder / "beside"
    write_job(after, options.blocks, steps=TRIAL_STEPS)
    begun_s = time.perf_counter()
    processed = ended(start("process", after, first))
    process_s = time.perf_counter() - begun_s
    trial = ended(start("train", after, second))
    # Not beyond the first epoch: the second one needs every block, however long training is.
    epoch = processed["tokens"] // (SEQUENCE_TOKENS * PACKS_PER_STEP)
    steps = options.steps or max(1, min(epoch, round(process_s / statistics.median(trial["step_s"]))))
    write_job(after, options.blocks, steps=steps)
    begun_s = time.perf_counter()
    training = ended(start("train", after, second))
    train_s = time.perf_counter() - begun_s
    write_job(beside, options.blocks, steps=steps)
    begun_s = time.perf_counter()
    both = [start("process", beside, first), start("train", beside, second)]
    made, trained = map(ended, both)
    together_s = time.perf_counter() - begun_s
    if trained["losses"] != training["losses"]:
        raise SystemExit("losses differ: the order depends on when blocks were sealed")
    return {
        "overlap_speedup_ratio": (process_s + train_s) / together_s,
        "process_s": process_s,
        "train_s": train_s,
        "together_s": together_s,
        "process_beside_s": made[SECONDS],
        "waited_s": trained["waited_s"],
        "steps": steps,
        "records": options.blocks * GROUP,
    }


def start(what: str, folder: Path, core: int) -> subprocess.Popen[str]:
    """Start one side, with all its children on one core."""
    return subprocess.Popen(
        [sys.executable, __file__, "--do", what, str(folder), str(core)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
    )


def ended(side: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a side; return what it says."""
    output, _ = side.communicate(timeout=LIMIT_S)
    if side.returncode:
        raise SystemExit(f"{side.args!r} ended with code {side.returncode}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    shown = {name: value for name, value in answer.items() if not isinstance(value, list)}
    print(f"{side.args!r}: {shown}", file=sys.stderr)
    return answer


def write_job(folder: Path, blocks: int, *, steps: int) -> None:
    """Write a job and its tokenizer, and register its pages."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {QUESTION: 9, **{str(digit): 1 for digit in range(10)}}
    (folder / "tokenizer.json").write_bytes(train_tokenizer(texts, vocabulary=320))
    (folder / "polyreme-template.json").write_text(json.dumps(OWN_TEMPLATE.model_dump(by_alias=True)))
    job = {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {
                "sources": [{"name": "pages", "dataset": "pages"}],
                "sequenceTokens": SEQUENCE_TOKENS,
                "tokenizer": {"location": folder.as_uri()},
                "startWhileProcessing": True,
            },
            "training": {"steps": steps, "packsPerStep": PACKS_PER_STEP},
        },
    }
    (folder / SPEC).write_text(json.dumps(job))
    pages = describe(digits=DIGITS, pages=blocks * GROUP, seed=5, heldout=False)
    hub.register(registry(folder), objects(folder), "pages", pages)


def registry(folder: Path) -> str:
    """Name the registry."""
    return f"sqlite:///{folder}/registry.sqlite"


def objects(folder: Path) -> str:
    """Name the object store."""
    return f"file://{folder}/objects"


def spec_of(folder: Path) -> TrainingJobSpec:
    """Read the job."""
    return parse_job(json.loads((folder / SPEC).read_text())).spec


def process(folder: Path) -> dict[str, Any]:
    """Process the data."""
    begun_s = time.perf_counter()
    spec = spec_of(folder)
    report = hub.process(spec, registry_url=registry(folder), objects_url=objects(folder), job="bench", workers=1)
    return {SECONDS: time.perf_counter() - begun_s, "tokens": report.datasets[0].tokens}


def train(folder: Path) -> dict[str, Any]:
    """Train as a rank does, with checkpoints as seldom as can be."""
    from polyreme_planner.layout import Layout
    from polyreme_planner.plan import shape_of
    from polyreme_system.clock import SystemClock
    from polyreme_trainer.parallel.world import RankSettings
    from polyreme_trainer.train.run import train_rank
    from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings

    begun_s = time.perf_counter()
    spec = spec_of(folder)
    source = job_packs.open_source(objects(folder), spec, job="bench")
    with tempfile.TemporaryDirectory(dir=folder) as saved:
        settings = TrainSettings(
            rank=RankSettings(rank=0, world=1, attempt=1),
            layout=Layout(),
            shape=shape_of(spec),
            steps=spec.training.steps_known,
            data_wait_s=float(spec.data.wait_seconds),
            checkpoint=CheckpointSettings(store=open_store(f"file://{saved}"), folder=Path(saved)),
        )
        code = train_rank(settings, source=source, evaluation=None, sink=Silent(), clock=SystemClock())
        lines = [json.loads(line) for path in Path(saved).glob("steps/*.jsonl") for line in path.open()]
    if code:
        raise SystemExit(f"training ended with code {code}")
    return {
        SECONDS: time.perf_counter() - begun_s,
        "losses": [line["loss"] for line in lines],
        "step_s": [line["stepS"] for line in lines],
        "waited_s": sum(line["dataWaitS"] for line in lines),
    }


class Silent:
    """Takes progress, and drops it."""

    def report(self, _: object) -> None:
        """Drop it."""


if __name__ == "__main__":
    sys.exit(main())
