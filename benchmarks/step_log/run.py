"""Time to read a long step log by columns, beside JSON Lines alone.

Usage: run.py [--steps 1000000]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from polyreme.run_files.records import RunRecords, read_steps
from polyreme_api.history import ResumePoint, steps_key
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import column_of, parse_steps
from polyreme_datahub.objects import open_store
from polyreme_trainer.train.records import SEGMENT_STEPS, open_step_log

MOST_S = 2.0
"""For a million steps; of fewer, as much less."""
POINTS = [ResumePoint(attempt=1)]


def main() -> int:
    """Run and print one line of JSON; 0 when the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder).as_uri())
        write(Path(folder), options.steps)
        lines = store.get(steps_key(1))
        begun_s = time.perf_counter()
        losses = losses_of(RunRecords(points=POINTS, steps=read_steps(store), checkpoints=(), evaluation=None))
        columns_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        parsed = parse_steps(lines)
        lines_s = time.perf_counter() - begun_s
    assert losses == [record.loss for record in parsed], "both readers see the same"
    figures = {
        "steps": options.steps,
        "columns_s": round(columns_s, 3),
        "json_lines_s": round(lines_s, 3),
        "columns_to_lines_ratio": round(columns_s / lines_s, 4),
        "bytes_a_step": round(len(lines) / options.steps),
    }
    most_s = MOST_S * max(0.05, options.steps / 1_000_000)
    bar = {"columns_s": f"<= {most_s:g}"}
    good = columns_s <= most_s
    sys.stdout.write(json.dumps({"name": "bench-step-log", "figures": figures, "bar": bar, "ok": good}) + "\n")
    return 0 if good else 1


def losses_of(records: RunRecords) -> list[float]:
    """Return what a curve needs of the history."""
    return list(column_of(records.history, "loss"))


def write(folder: Path, steps: int) -> None:
    """Write a log as a run leaves it that saves every 10,000 steps: closed segments, and the last one open."""
    with open_step_log(open_store(folder.as_uri()), folder, 1, rank=0) as log:
        for step in range(1, steps + 1):
            log.write(record(step))
            if step % SEGMENT_STEPS == 0 and step < steps:
                log.flush()


def record(step: int) -> StepRecord:
    """Return a step as ranks record it, with a held-out loss now and then."""
    return StepRecord(
        attempt=1,
        step=step,
        loss=3.0 / step**0.5,
        gradient_norm=1.0 + 1 / step,
        learning_rate=2e-4,
        tokens=4_194_304,
        step_s=12.345678,
        data_wait_s=0.000321,
        ended_at_s=1_700_000_000.0 + 12.4 * step,
        ended_steady_s=12.4 * step,
        expert_load_max=1.25,
        router_entropy=3.9,
        held_out={} if step % 500 else {"": 2.5},
    )


if __name__ == "__main__":
    sys.exit(main())
