"""Makes the data of bench-loader: each dataset processed for a job, and the same samples as files for the peers."""

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pipeline import photos
from PIL import Image

from polyreme_api.job import parse_job
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key
from polyreme_datahub.index.sample_bytes import RECORD_FILE, member_files
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import open_store

VOCABULARY = 512
ONE_SOURCE = {"photos": 1}
SOURCES = {"photos": 2, "small": 1, "text": 1}
"""Weights of the mixture, by samples."""
TEXT_WORDS = (40, 160)
WORDS = (
    "the image",
    "shows",
    "a small red",
    "house near",
    "water under clouds",
    "with",
    "two people",
    "and an old tree",
)


def prepare(folder: Path, counts: Mapping[str, int], job: Mapping[str, Any]) -> int:
    """Process the samples of each source for a job, and lay the same ones out for the peers.

    Args:
        folder: Folder of all of it.
        counts: Samples by source.
        job: The job that reads them.

    Returns:
        How many steps there are before a sample comes again.
    """
    (folder / "job.json").write_text(json.dumps(job))
    registry, objects = f"sqlite:///{folder}/registry.sqlite", f"file://{folder}/objects"
    spec = parse_job(job).spec
    for name, count in counts.items():
        hub.register(registry, objects, name, LISTINGS[name](folder, count))
    hub.process(spec, registry_url=registry, objects_url=objects)
    source = job_packs.open_source(objects, spec)
    indexes = source._indexes  # noqa: SLF001 - the very samples and grids of the plan
    manifest = indexes[0].manifest
    (folder / "tokenizer.json").write_bytes((folder / "objects" / blob_key(manifest.tokenizer)).read_bytes())
    (folder / "work.json").write_text(json.dumps({"patch_px": manifest.patch_px, "merge": manifest.merge}))
    for name, index in zip(counts, indexes, strict=True):
        samples = folder / "samples" / name
        samples.mkdir(parents=True)
        for at in range(len(index)):
            files = member_files(index.encoded(at))
            record = json.loads(bytes(files[RECORD_FILE]))
            facts = {
                "name": index.sample_id(at),
                "conversations": record["conversations"],
                "grids": index.grids(at).tolist(),
                "open": [page["open"] for page in record["pages"]][:1],
            }
            (samples / f"{at:06d}.json").write_text(json.dumps(facts))
            images = [bytes(files[page["file"]]) for page in record["pages"]]
            (samples / f"{at:06d}.jpg").write_bytes(b"".join(images[:1]))
    return steps_without_repeats(source)


def job_of(sources: Mapping[str, int], *, sequence_tokens: int, packs_per_step: int, augment: bool) -> dict[str, Any]:
    """Return a job that reads some sources."""
    more = {"augment": {"crop": {"minAreaPercent": 60}, "color": {}}} if augment else {}
    return {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {
                "sources": [{"name": name, "dataset": name, "weight": weight} for name, weight in sources.items()],
                "sequenceTokens": sequence_tokens,
                "waitSeconds": 0,
                "tokenizer": {"vocabulary": VOCABULARY},
                **more,
            },
            "training": {"steps": 1_000_000, "packsPerStep": packs_per_step},
        },
    }


def upload(folder: Path, url: str) -> None:
    """Put all files of a folder into a bucket, under their paths."""
    store = open_store(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())


def steps_without_repeats(source: PackedSource) -> int:
    """Return how many steps there are before a sample comes again: no document may come from the cache."""
    seen: set[tuple[int, int]] = set()
    for step in itertools.count(1):
        slots = [(slot.source, slot.sample) for pack in source._steps.packs(step) for slot in pack or ()]  # noqa: SLF001
        if not seen.isdisjoint(slots) or len(set(slots)) < len(slots):
            return step - 1
        seen.update(slots)
    raise AssertionError


def _photos(folder: Path, count: int) -> Path:
    del folder
    return photos.write_photos(photos.FOLDER, count)


def _small(folder: Path, count: int) -> Path:
    """Write the photographs in half their size."""
    place = folder / "small"
    place.mkdir()
    photos.write_photos(photos.FOLDER, count)
    lines = []
    for at in range(count):
        with Image.open(photos.FOLDER / f"{at:06d}.jpg") as image:
            image.resize((photos.WIDTH // 2, photos.HEIGHT // 2)).save(place / f"{at}.jpg", quality=photos.QUALITY)
        lines.append(_record(f"small-{at}", "What is it?", f"A small one, {at}.", [f"{at}.jpg"]))
    return _listing(place, lines)


def _text(folder: Path, count: int) -> Path:
    place = folder / "text"
    place.mkdir()
    generator = random.Random(0)
    lines = []
    for at in range(count):
        words = " ".join(generator.choices(WORDS, k=generator.randint(*TEXT_WORDS)))
        lines.append(_record(f"text-{at}", "Tell a story.", words, []))
    return _listing(place, lines)


def _record(name: str, question: str, answer: str, images: list[str]) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"id": name, "images": images, "conversations": turns})


def _listing(place: Path, lines: list[str]) -> Path:
    listing = place / "samples.jsonl"
    listing.write_text("\n".join(lines) + "\n")
    return listing


LISTINGS = {"photos": _photos, "small": _small, "text": _text}
