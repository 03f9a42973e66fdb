"""Opens data of many sources, reads some steps, and prints what memory and time that took; see growth.py.

Usage: grown.py JSON, see ``Asked``.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.loader import growth, ours, work

import polyreme_datahub.tokens  # noqa: F401 - its memory counts as that of imports
from polyreme_api import environment as names
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.client import EngineSource
from polyreme_datahub.loader.sample import documents


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is read."""

    place: str
    sources: int
    threads: int
    ranks: int
    """Processes that read from an engine; 0: this one reads by itself."""
    steps: int


def main(asked: Asked) -> None:
    """Open, read and report."""
    os.environ[names.DATA_THREADS] = str(asked.threads)
    # Small samples are otherwise read by the thread that asks, and the others would have nothing to do.
    documents.DECODE_BYTES_MIN = 0
    spec, objects = growth.spec_of(asked.sources), f"file://{asked.place}/objects"
    imported_mib, began_s = work.pss_mib(os.getpid()), time.monotonic()
    if not asked.ranks:
        source = job_packs.open_source(objects, spec)
        open_s = time.monotonic() - began_s
        for step in range(1, asked.steps + 1):
            source.packs(step, first=0, count=source.packs_in(step))
        most_mib = work.pss_mib(os.getpid())
    else:
        job = json.loads(spec.model_dump_json(by_alias=True, exclude_none=True))
        whole = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "bench"}}
        with ours.engine(Path(asked.place, "job.json"), objects, {**whole, "spec": job}) as (attempt, _):
            open_s, most_mib = by_ranks(attempt, asked)
    print(json.dumps({"pss_over_import_mib": most_mib - imported_mib, "open_s": open_s}))


def by_ranks(attempt: Callable[[int], EngineSource], asked: Asked) -> tuple[float, float]:
    """Return how long all ranks take until they have opened, and the memory of all processes after the last step."""
    began_s = time.monotonic()
    read_end, write_end = os.pipe()
    hold, held = os.pipe()
    children = []
    for rank in range(asked.ranks):
        if child := os.fork():
            children.append(child)
            continue
        os.close(held)
        source = attempt(1)
        os.write(write_end, b"o")
        share = max(1, source.packs_in(1) // asked.ranks)
        kept = [source.packs(step, first=rank * share, count=share) for step in range(1, asked.steps + 1)]
        os.write(write_end, b"r")
        os.read(hold, 1)
        os._exit(len(kept) - asked.steps)
    os.close(hold)
    opened = done = 0
    open_s = 0.0
    while done < asked.ranks:
        said = os.read(read_end, 1)
        opened, done = opened + (said == b"o"), done + (said == b"r")
        open_s = open_s or (time.monotonic() - began_s if opened == asked.ranks else 0.0)
    most_mib = work.pss_mib(os.getpid())
    os.close(held)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    return open_s, most_mib


if __name__ == "__main__":
    main(Asked(**json.loads(sys.argv[1])))
