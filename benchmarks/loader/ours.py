"""Our loader: packs of a step, as a rank reads them.

Usage: ours.py FOLDER THREADS
"""

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import work

from polyreme_api.environment import DATA_THREADS
from polyreme_api.job import parse_job
from polyreme_datahub import hub
from polyreme_datahub.loader.source import PackedSource


def main(folder: Path, threads: int) -> None:
    """Read packs as long as each sample is new."""
    os.environ[DATA_THREADS] = str(threads)
    job = json.loads((folder / "job.json").read_text())
    objects, spec = f"file://{folder}/objects", parse_job(job).spec
    steps = steps_without_repeats(hub.open_source(objects, spec))
    meter = work.Meter()
    source = hub.open_source(objects, spec)
    for step in range(1, steps + 1):
        batch = source.packs(step, first=0, count=source.packs_in(step))
        tokens_T, patches_PC = np.asarray(batch.tokens_T), np.asarray(batch.patches_PC)
        ends, bounds = np.cumsum(np.asarray(batch.grids_I2).prod(axis=1)), np.asarray(batch.document_offsets)
        filled = [at for at in range(len(bounds) - 1) if tokens_T[bounds[at]] != source.token_ids.pad]
        for number, (name, at) in enumerate(zip(batch.sample_ids, filled, strict=True)):
            start = int(ends[number - 1]) if number else 0
            meter.take(name, tokens_T[bounds[at] : bounds[at + 1]], patches_PC[start : int(ends[number])])
        meter.end_batch()
    meter.report()


def steps_without_repeats(source: PackedSource) -> int:
    """Return how many steps there are before a sample comes again: no document may come from the cache."""
    seen: set[tuple[int, int]] = set()
    for step in itertools.count(1):
        slots = [(slot.source, slot.sample) for pack in source._packs(step) for slot in pack]  # noqa: SLF001
        if not seen.isdisjoint(slots) or len(set(slots)) < len(slots):
            return step - 1
        seen.update(slots)
    raise AssertionError


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
