"""Reads a job's packs as its ranks do, and writes down what each sample was: a process to be killed at any point.

    python -m tests.unit.datahub.exact_reader OBJECTS_URL JOB_FILE MIXTURE_FILE RANKS STEPS OUTPUT STATE

Continues from the state, if there is one, and writes it every few steps, as checkpoints do.
"""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from polyreme_api.batch import PackedBatch
from polyreme_api.job import parse_job
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.source import PackedSource

EVERY_STEPS = 5
PATCHES_PER_TOKEN = 4


def digest(array: Any) -> str:
    """A short digest of an array's values."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def samples_of(batch: PackedBatch, media: int) -> list[list[str]]:
    """Name and digests (tokens, targets, patches) of each sample of one pack."""
    offsets, tokens_T, targets_T = (np.asarray(of) for of in (batch.document_offsets, batch.tokens_T, batch.targets_T))
    patches_PC = np.asarray(batch.patches_PC)
    found, patch = [], 0
    for name, first, stop in zip(batch.sample_ids, offsets, offsets[1:], strict=False):
        patches = PATCHES_PER_TOKEN * int((tokens_T[first:stop] == media).sum())
        arrays = (tokens_T[first:stop], targets_T[first:stop], patches_PC[patch : patch + patches])
        found.append([name, *map(digest, arrays)])
        patch += patches
    if patch != len(patches_PC):
        raise AssertionError(f"pack has {len(patches_PC)} patches, and tokens for {patch}")
    return found


def read_share(source: PackedSource, step: int, rank: int, ranks: int) -> list[list[list[str]]]:
    """What a rank trains on in a step: its packs together are its packs one by one."""
    packs = source.packs_in(step)
    first, stop = (packs * at // ranks for at in (rank, rank + 1))
    together = source.packs(step, first=first, count=stop - first)
    single = [source.packs(step, first=at, count=1) for at in range(first, stop)]
    for name in ("tokens_T", "targets_T", "positions_T", "patches_PC", "grids_I2"):
        joined = np.concatenate([np.asarray(getattr(pack, name)) for pack in single])
        if not np.array_equal(np.asarray(getattr(together, name)), joined):
            raise AssertionError(f"{name} of step {step}, rank {rank} of {ranks}: not those of its packs one by one")
    return [samples_of(pack, source.token_ids.media) for pack in single]


def main(arguments: list[str]) -> None:
    """Read until the last step."""
    objects, job_file, mixture_file, ranks, steps, output, state_file = (
        of(value) for of, value in zip((str, Path, Path, int, int, Path, Path), arguments, strict=True)
    )
    spec = parse_job(yaml.safe_load(job_file.read_text())).spec
    mixture = MixtureRecord.model_validate_json(mixture_file.read_text())
    sources = [job_packs.open_source(objects, spec, mixture=mixture) for _ in range(ranks)]
    done = 0
    if state_file.exists():
        state = json.loads(state_file.read_text())
        done = state["step"]
        for source in sources:
            source.check_state(state)
    with output.open("a") as lines, ThreadPoolExecutor(ranks) as pool:
        for step in range(done + 1, steps + 1):
            shares = pool.map(lambda rank, step=step: read_share(sources[rank], step, rank, ranks), range(ranks))
            packs = [pack for share in shares for pack in share]
            lines.write(json.dumps({"step": step, "ranks": ranks, "packs": packs}) + "\n")
            lines.flush()
            if step % EVERY_STEPS == 0:
                fresh = state_file.with_suffix(".new")
                fresh.write_text(json.dumps(dict(sources[step % ranks].state(step))))
                fresh.replace(state_file)


if __name__ == "__main__":
    main(sys.argv[1:])
