"""Our loader: packs of a step, as a rank reads them, by itself or from the data engine of its pod.

Usage: ours.py FOLDER THREADS [engine]
"""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import work

from polyreme_api import environment as names
from polyreme_api.batch import BatchSource
from polyreme_api.history import ResumePoint, attempt_key
from polyreme_api.job import parse_job
from polyreme_datahub import hub
from polyreme_datahub.loader.balance import StepSplit
from polyreme_datahub.loader.engine_client import EngineSource
from polyreme_datahub.loader.source import PackedSource

OPEN_WAIT_S = 60.0
ATTEMPTS = (1, 2)


def main(folder: Path, threads: int, *, by_engine: bool) -> None:
    """Read packs as long as each sample is new."""
    os.environ[names.DATA_THREADS] = str(threads)
    job = json.loads((folder / "job.json").read_text())
    objects, spec = f"file://{folder}/objects", parse_job(job).spec
    steps = steps_without_repeats(hub.open_source(objects, spec))
    meter = work.Meter()
    if not by_engine:
        read(hub.open_source(objects, spec), steps, meter)
        meter.report()
        return
    job["spec"]["training"]["steps"] = steps
    with engine(folder, objects, job) as attempt:
        source = attempt(1)
        read(source, steps, meter)
        state = source.state(steps // 2)
        meter.stop()
        began_s = time.monotonic()
        resumed = attempt(2)
        resumed.check_state(state)
        resumed.packs(steps // 2 + 1, first=0, count=resumed.packs_in(1))
        meter.report({"resume_first_batch_s": time.monotonic() - began_s})


def read(source: BatchSource, steps: int, meter: work.Meter) -> None:
    """Read all packs of some steps."""
    for step in range(1, steps + 1):
        batch = source.packs(step, first=0, count=source.packs_in(step))
        tokens_T, patches_PC = np.asarray(batch.tokens_T), np.asarray(batch.patches_PC)
        ends, bounds = np.cumsum(np.asarray(batch.grids_I2).prod(axis=1)), np.asarray(batch.document_offsets)
        filled = [at for at in range(len(bounds) - 1) if tokens_T[bounds[at]] != source.token_ids.pad]
        for number, (name, at) in enumerate(zip(batch.sample_ids, filled, strict=True)):
            start = int(ends[number - 1]) if number else 0
            meter.take(name, tokens_T[bounds[at] : bounds[at + 1]], patches_PC[start : int(ends[number])])
        meter.end_batch()


@contextlib.contextmanager
def engine(folder: Path, objects: str, job: dict[str, Any]) -> Iterator[Callable[[int], EngineSource]]:
    """Run a data engine, as a launcher does; gives how a rank of an attempt opens its data."""
    job_file, path = folder / "engine-job.json", folder / "engine.socket"
    job_file.write_text(json.dumps(job))
    for number in ATTEMPTS:
        point = folder / "checkpoints" / attempt_key(number)
        point.parent.mkdir(parents=True, exist_ok=True)
        point.write_text(ResumePoint(attempt=number).model_dump_json(by_alias=True))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        running = subprocess.Popen(
            [sys.executable, "-m", "polyreme_datahub.loader.engine", str(listener.fileno()), str(os.getpid())],
            env={
                **os.environ,
                names.OBJECTS_URL: objects,
                names.JOB_UID: "",
                names.CHECKPOINT_URL: (folder / "checkpoints").absolute().as_uri(),
            },
            pass_fds=[listener.fileno()],
        )
        descriptor = os.open(path, os.O_PATH)
        split = StepSplit(data_ranks=1)
        try:
            yield lambda attempt: EngineSource(
                descriptor,
                attempt=attempt,
                job_file=str(job_file),
                open_wait_s=OPEN_WAIT_S,
                pixels=True,
                pod_pixels=True,
                split=split,
            )
        finally:
            running.kill()
            running.wait()


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
    main(Path(sys.argv[1]), int(sys.argv[2]), by_engine="engine" in sys.argv[3:])
