"""Growth of memory and opening time with sources, threads, shards and ranks: our loader on small samples of text.

Datasets are written as processing writes them, but many at once: one is processed, and the others are laid out from its
plan. A job has at most 256 sources; the loader itself is opened here with more.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.loader import contenders, prepare

from polyreme_api.job import parse_job
from polyreme_api.job.data import Source
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub import hub
from polyreme_datahub.digests import canonical_json
from polyreme_datahub.index import write
from polyreme_datahub.index.format import Manifest, parse_plan, plan_key, seal_plan
from polyreme_datahub.index.sample_bytes import check_of
from polyreme_datahub.index.tar_shards import SHARD_BYTES_MAX
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.tokens import encode_conversation, open_tokenizer, token_arrays

SOURCES = (1, 35, 500)
SHARDS = (1, 32, 512)
RANKS = (1, 8, 32)
THREADS = (1, 8)
RANK_SOURCES = (1, 250)
"""Those that ranks read go through a job, which takes at most 256."""
RUNS = 2
TOTAL = 8_192
"""Samples of all sources together: only their number grows."""
SEQUENCE_TOKENS, PACKS_PER_STEP, STEPS = 2_048, 32, 2
TURNS = 4


def measure(folder: Path) -> dict[str, float]:
    """Return memory beyond the imports and the time of opening, by count of each."""
    folder.mkdir()
    figures: dict[str, float] = {}
    grown: dict[tuple[int, int], float] = {}
    for sources in SOURCES:
        place = lay_out(folder / f"sources-{sources}", sources, shards=1)
        for threads in THREADS:
            found = read(place, sources=sources, threads=threads)
            grown[sources, threads] = found["pss_over_import_mib"]
            figures |= _named(f"growth_{sources}_sources_{threads}_threads", found)
    for shards in SHARDS:
        place = lay_out(folder / f"shards-{shards}", 1, shards=shards)
        figures |= _named(f"growth_{shards}_shards", read(place, sources=1))
    for sources in RANK_SOURCES:
        place = lay_out(folder / f"ranks-{sources}", sources, shards=1)
        for ranks in RANKS:
            found = read(place, sources=sources, ranks=ranks)
            grown[sources, -ranks] = found["pss_over_import_mib"]
            figures |= _named(f"growth_{sources}_sources_{ranks}_ranks", found)
    figures["growth_sources_x_threads_mib"] = _crossed(grown, SOURCES, THREADS)
    figures["growth_sources_x_ranks_mib"] = _crossed(grown, RANK_SOURCES, [-ranks for ranks in RANKS])
    return {name: round(value, 3) for name, value in figures.items()}


def _crossed(grown: Mapping[tuple[int, int], float], sources: Sequence[int], readers: Sequence[int]) -> float:
    """Return what most sources cost more with most readers than with one."""
    most, few = (grown[count, readers[-1]] - grown[count, readers[0]] for count in (sources[-1], sources[0]))
    return most - few


def _named(name: str, found: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_pss_mib": found["pss_over_import_mib"], f"{name}_open_s": found["open_s"]}


def read(place: Path, *, sources: int, threads: int = 2, ranks: int = 0) -> dict[str, Any]:
    """Open the data in a fresh process and read some steps; with ranks, each is a process, and an engine serves them.

    A few runs, and the least memory of them: what else a process happens to hold differs by some MiB.
    """
    asked = {"place": str(place), "sources": sources, "threads": threads, "ranks": ranks, "steps": STEPS}
    found = [contenders.call(contenders.Command(script="grown.py", asked=asked, caches=place)) for _ in range(RUNS)]
    return {kind: min(one[kind] for one in found) for kind in found[0]}


def spec_of(sources: int) -> TrainingJobSpec:
    """Return a job's spec with any number of sources."""
    job = prepare.job_of({"s0": 1}, sequence_tokens=SEQUENCE_TOKENS, packs_per_step=PACKS_PER_STEP, augment=False)
    spec = parse_job(job).spec
    named = [Source(name=f"s{at}", dataset=f"s{at}", weight=1) for at in range(sources)]
    return spec.model_copy(update={"data": spec.data.model_copy(update={"sources": named})})


def lay_out(place: Path, sources: int, *, shards: int) -> Path:
    """Write the indexes and the sample shards of some datasets of equal size, and their plan."""
    place.mkdir()
    objects = f"file://{place}/objects"
    registry = f"sqlite:///{place}/registry.sqlite"
    listing = place / "first.jsonl"
    listing.write_text(json.dumps({"id": "first", "images": [], **_turns(0)}) + "\n")
    hub.register(registry, objects, "s0", listing)
    first = spec_of(1)
    hub.process(first, registry_url=registry, objects_url=objects)
    store = open_store(objects)
    lakehouse, key = Lakehouse(store), plan_key("", plan_data(first))
    plan = parse_plan(store.get(key), key)
    manifest = Manifest.from_bytes(lakehouse.get_blob(plan["manifests"]["s0"]))
    tokenizer = Blob(lakehouse.get_blob(manifest.tokenizer), digest=manifest.tokenizer)
    count = TOTAL // sources
    for at in range(sources):
        samples = list(_samples(tokenizer, at, count))
        made = _dataset(lakehouse, manifest, at, samples, shards)
        plan["manifests"][f"s{at}"] = lakehouse.put_blob(made.to_bytes())
    store.put(plan_key("", plan_data(spec_of(sources))), canonical_json(seal_plan(plan)))
    return place


def _dataset(
    lakehouse: Lakehouse, manifest: Manifest, source: int, samples: Sequence[write.IndexedSample], shards: int
) -> Manifest:
    bytes_each = len(canonical_json(samples[0].record)) + 1_024
    # Shards of a release have 64 MiB: many of them would take gigabytes.
    bytes_max = SHARD_BYTES_MAX if shards == 1 else bytes_each * len(samples) // shards
    with mock.patch.object(write, "SHARD_BYTES_MAX", bytes_max):
        written, tokens = write.write_shards(lakehouse, samples, patch_px=manifest.patch_px)
    return dataclasses.replace(manifest, name=f"s{source}", samples=len(samples), tokens=tokens, shards=written)


def _samples(tokenizer: Blob, source: int, count: int) -> Iterator[write.IndexedSample]:
    for at in range(count):
        record = _turns(source * count + at)
        encoded = encode_conversation(open_tokenizer(tokenizer.digest, tokenizer.data), record["conversations"], [])
        check = check_of(*token_arrays(encoded))
        facts = {**encoded, "tokens": len(token_arrays(encoded)[0]), "check": check}
        yield write.IndexedSample(
            ordinal=at, sample_id=f"{source}-{at}", record=record, encoded=facts, pages=(), images={}, shapes={}
        )


def _turns(number: int) -> Mapping[str, Any]:
    said = [{"role": "user", "content": f"Count to {number}."}, {"role": "assistant", "content": f"{number} " * TURNS}]
    return {"conversations": said}
