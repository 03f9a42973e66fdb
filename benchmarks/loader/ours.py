"""Our loader: packs of a step, as a rank reads them, by itself or from the data engine of its pod.

Usage: ours.py JSON, see ``Asked``.
"""

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.loader import work

from polyreme_api import environment as names
from polyreme_api.batch import BatchSource
from polyreme_api.history import ResumePoint, attempt_key
from polyreme_api.job import parse_job
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.client import EngineSource, OpenRequest, receive, send
from polyreme_datahub.loader.order.balance import StepSplit

OPEN_WAIT_S = 60.0
RESUMES = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the benchmark asks of this process."""

    job: str
    """File of the job."""
    objects: str
    """URL of the objects."""
    steps: int
    """Steps that are read."""
    threads: int
    engine: bool = False
    packs: bool = False
    """Whether packs are counted; otherwise samples, and each comes once."""
    resume: bool = False
    """Whether resumes are measured too."""


def main(asked: Asked) -> None:
    """Read the packs of the steps."""
    os.environ[names.DATA_THREADS] = str(asked.threads)
    job = json.loads(Path(asked.job).read_text())
    meter = work.Meter()
    take = take_packs if asked.packs else take_samples
    if not asked.engine:
        spec = parse_job(job).spec
        take(job_packs.open_source(asked.objects, spec), asked.steps, meter)
        meter.report(pack_tokens=spec.data.sequence_tokens)
        return
    job["spec"]["training"]["steps"] = asked.steps
    with engine(Path(asked.job), asked.objects, job) as (attempt, engine_start_s):
        meter.start()
        source = attempt(1)
        take(source, asked.steps, meter)
        meter.stop()
        more = {"resume_first_batch_s": resumed_s(source, attempt, asked.steps)} if asked.resume else {}
        meter.report({"engine_start_s": engine_start_s, **more}, pack_tokens=job["spec"]["data"]["sequenceTokens"])


def resumed_s(source: EngineSource, attempt: Callable[[int], EngineSource], steps: int) -> float:
    """Return how long a new attempt takes from its opening to a whole step, the median of some."""
    found = []
    for number in range(RESUMES):
        step = 1 + number * (steps - 1) // RESUMES
        state = source.state(step)
        began_s = time.monotonic()
        resumed = attempt(2 + number)
        resumed.check_state(state)
        resumed.packs(step + 1, first=0, count=resumed.packs_in(1))
        found.append(time.monotonic() - began_s)
        source = resumed
    return statistics.median(found)


def take_samples(source: BatchSource, steps: int, meter: work.Meter) -> None:
    """Read all packs of some steps, and take each sample."""
    for step in range(1, steps + 1):
        batch = source.packs(step, first=0, count=source.packs_in(step))
        tokens_T, patches_PC = np.asarray(batch.tokens_T), np.asarray(batch.patches_PC)
        ends, bounds = np.cumsum(np.asarray(batch.grids_I2).prod(axis=1)), np.asarray(batch.document_offsets)
        filled = [at for at in range(len(bounds) - 1) if tokens_T[bounds[at]] != source.token_ids.pad]
        for number, (name, at) in enumerate(zip(batch.sample_ids, filled, strict=True)):
            start = int(ends[number - 1]) if number else 0
            meter.take(name, tokens_T[bounds[at] : bounds[at + 1]], patches_PC[start : int(ends[number])])
        meter.end_batch()


def take_packs(source: BatchSource, steps: int, meter: work.Meter) -> None:
    """Read all packs of some steps, and count what is in them."""
    for step in range(1, steps + 1):
        packs = source.packs_in(step)
        batch = source.packs(step, first=0, count=packs)
        filled = int(np.count_nonzero(np.asarray(batch.tokens_T) != source.token_ids.pad))
        meter.take_packs(packs, filled, len(np.asarray(batch.patches_PC)), len(batch.sample_ids))


@contextlib.contextmanager
def engine(job_file: Path, objects: str, job: dict[str, Any]) -> Iterator[tuple[Callable[[int], EngineSource], float]]:
    """Run a data engine, as a launcher does, which starts it beside the ranks' parent.

    Gives how a rank of an attempt opens its data, and the time from the engine's start to its first answer [s].
    """
    given, path = job_file.with_name("engine-job.json"), job_file.with_name("engine.socket")
    given.write_text(json.dumps(job))
    checkpoints = job_file.parent.absolute() / "checkpoints"
    for number in range(1, RESUMES + 2):
        point = checkpoints / attempt_key(number)
        point.parent.mkdir(parents=True, exist_ok=True)
        point.write_text(ResumePoint(attempt=number).model_dump_json(by_alias=True))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        began_s = time.monotonic()
        running = subprocess.Popen(
            [sys.executable, "-m", "polyreme_datahub.loader.engine.server", str(listener.fileno()), str(os.getpid())],
            env={
                **os.environ,
                names.OBJECTS_URL: objects,
                names.JOB_UID: "",
                names.CHECKPOINT_URL: checkpoints.as_uri(),
            },
            pass_fds=[listener.fileno()],
        )
        descriptor = os.open(path, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ping:
                ping.settimeout(OPEN_WAIT_S)
                ping.connect(str(path))
                send(ping, {"call": "ping"})
                assert receive(ping) is not None
            engine_start_s = time.monotonic() - began_s

            def opened(attempt: int) -> EngineSource:
                return EngineSource(
                    descriptor,
                    OpenRequest(attempt=attempt, job=str(given), split=StepSplit(data_ranks=1), pixels=True),
                    open_wait_s=OPEN_WAIT_S,
                    pixels=True,
                )

            yield opened, engine_start_s
        finally:
            running.kill()
            running.wait()


if __name__ == "__main__":
    main(Asked(**json.loads(sys.argv[1])))
