"""Small jobs and datasets for the data plane's tests."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polyreme_api.history import ResumePoint, attempt_key
from polyreme_api.job import parse_job
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub import hub
from polyreme_datahub.chat_format import OWN_TEMPLATE
from polyreme_datahub.processing import ProcessReport
from polyreme_datahub.sources.digits import describe
from polyreme_datahub.tokens import train_tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """A registry and an object store in one folder."""

    folder: Path
    url: str = ""
    """Of the registry; empty: SQLite in the folder."""

    @property
    def registry(self) -> str:
        return self.url or f"sqlite:///{self.folder}/registry.sqlite"

    @property
    def objects(self) -> str:
        return f"file://{self.folder}/objects"

    def register(self, name: str, source: str | Path | Mapping[str, Any]) -> None:
        hub.register(self.registry, self.objects, name, source)

    def process(self, spec: TrainingJobSpec, job: str = "") -> ProcessReport:
        return hub.process(spec, registry_url=self.registry, objects_url=self.objects, job=job)


def make_spec(
    datasets: Sequence[str],
    *,
    heldout: Sequence[str] = (),
    weights: Sequence[int] | None = None,
    schedule: Sequence[tuple[int, Sequence[int]]] = (),
    sequence_tokens: int = 64,
    packs_per_step: int = 4,
    vocabulary: int = 512,
    seed: int = 3,
    samples_max: int = 20,
    on_damage: str = "Stop",
    packs_by: str = "Order",
    augment: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    early: bool = False,
) -> TrainingJobSpec:
    """A nano job over some datasets."""
    names = [f"s{at}" for at in range(len(datasets))]
    shares = weights or [1] * len(datasets)
    spec: dict[str, Any] = {
        "model": {"preset": "kimi-vl-nano"},
        "data": {
            "sources": [
                {"name": name, "dataset": dataset, "weight": share}
                for name, dataset, share in zip(names, datasets, shares, strict=True)
            ],
            "schedule": [
                {
                    "fromStep": step,
                    "weights": [{"source": n, "weight": w} for n, w in zip(names, changed, strict=True)],
                }
                for step, changed in schedule
            ],
            "sequenceTokens": sequence_tokens,
            "seed": seed,
            "waitSeconds": 0,
            "onDamage": on_damage,
            "packsBy": packs_by,
            "tokenizer": tokenizer or {"vocabulary": vocabulary},
            "startWhileProcessing": early,
        },
        "training": {"steps": 100, "packsPerStep": packs_per_step},
    }
    if augment is not None:
        spec["data"]["augment"] = augment
    if heldout:
        sets = [{"name": f"h{at}", "dataset": dataset} for at, dataset in enumerate(heldout)]
        spec["evaluation"] = {"sets": sets, "samplesMax": samples_max}
    job = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "t"}, "spec": spec}
    return parse_job(job).spec


def fix_points(folder: Path, attempts: int = 3) -> str:
    """Fix resume points that say nothing of the mixture; return the URL of their checkpoint root."""
    for attempt in range(1, attempts + 1):
        path = folder / attempt_key(attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ResumePoint(attempt=attempt).model_dump_json(by_alias=True))
    return folder.as_uri()


def digits(count: int, *, pages: int, heldout: bool = False, seed: int = 5) -> dict[str, Any]:
    """Describe pages of digits."""
    return describe(digits=count, pages=pages, seed=seed, heldout=heldout)


def released_tokenizer(folder: Path) -> dict[str, str]:
    """Write a tokenizer for pages of digits as one comes with weights; return ``data.tokenizer``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"Which digits, left to right?": 9, **{str(digit): 1 for digit in range(10)}}
    (folder / "tokenizer.json").write_bytes(train_tokenizer(texts, vocabulary=320))
    (folder / "polyreme-template.json").write_text(json.dumps(OWN_TEMPLATE.model_dump(by_alias=True)))
    return {"location": folder.as_uri()}


def picture(width: int, height: int, *, kind: str = "PNG", orientation: int = 1, seed: int = 0) -> bytes:
    """A coloured picture with a bright top-left corner."""
    pixels = np.random.default_rng(seed).integers(0, 100, size=(height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = 250
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif)
    return buffer.getvalue()


def record(name: str, images: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """A record with one question and one answer."""
    turns = [{"role": "user", "content": f"What is {name}?"}, {"role": "assistant", "content": f"It is {name}."}]
    return {"id": name, "images": list(images), "conversations": turns, **more}


def write_jsonl(folder: Path, lines: Sequence[dict[str, Any] | str], name: str = "data.jsonl") -> Path:
    """Write records, or raw text, one a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return path
