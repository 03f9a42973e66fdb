"""Exactness of the loader under restarts: what is planted, the readers that are killed, and the walker's verdict."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from PIL import Image
from tokenizers import Tokenizer

from polyreme_api.job import TrainingJobSpec, parse_job
from polyreme_datahub.digests import blob_key
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import open_tokenizer
from polyreme_datahub.loader.sample.documents import PLACEHOLDER
from polyreme_datahub.objects import store_folder
from polyreme_planner.mixture import first_mixture, next_mixture
from tests.unit.datahub.exact_reader import digest
from tests.unit.datahub.jobs import Home, picture, record, write_jsonl
from tests.unit.datahub.naive_loader import WINDOW_PACKS, Phase, Visit, Walk, whole_weights

SOURCES = 8
PAGES, PHOTOS, LIMITED = 0, 1, 2
"""Sources with images; photos are augmented, all others are text; one has a limit of epochs."""
EPOCHS_MAX, SKIP_STEPS = 3, 5
SIDES = (28, 56)
TOKEN_PX, PATCH_PX = 28, 14
IGNORED = -100
PACK_TOKENS, PACKS_PER_STEP, SEED = 96, 8, 11
RANKS = (8, 7, 3, 8)
THREADS = (1, 2, 4)
LIMIT_S = 600.0
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A processed job, and what its samples are."""

    home: Home
    job_file: Path
    walk: Walk
    names: Sequence[Sequence[str]]
    """Samples of each source, in the order of the index."""
    contents: Mapping[str, tuple[str, str, str | None]]
    """Digests of tokens, targets and patches of each sample; no patches of one that is augmented."""
    mixtures: Sequence[Path]
    """What an attempt before the appended change of weights trains by, and one after it."""
    border: int
    """Step with which the appended change takes effect."""


def plant(folder: Path, *, samples: int, steps: int, rng: random.Random) -> Planted:
    """Process a job over eight sources whose weights change twice, with bad records, and damage one stored sample.

    The second change is appended to the schedule of a job that has run, and passes over some steps. Weights are shares
    of tokens, with a temperature; one source ends after some epochs.

    Args:
        folder: Where.
        samples: Of each source.
        steps: Of the job.
        rng: Draws images and texts.
    """
    home = Home(folder / "home")
    for source in range(SOURCES):
        lines = list(_records(folder / "set", source, samples, rng))
        home.register(f"d{source}", write_jsonl(folder / "set", lines, f"d{source}.jsonl"))
    phases = [
        Phase(
            first_step=step,
            weights=[rng.randint(0, 9) or int(source % 2 or source == LIMITED) for source in range(SOURCES)],
            skip_steps=SKIP_STEPS if step == steps // 2 else 0,
        )
        for step in (1, steps // 3, steps // 2)
    ]
    job = _job(steps, phases)
    border = phases[1].first_step
    while border < phases[2].first_step:
        border += WINDOW_PACKS // PACKS_PER_STEP
    phases[2] = replace(phases[2], first_step=border)
    job_file = folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(job))
    spec = parse_job(job).spec
    home.process(spec)
    indexes = job_packs.open_source(home.objects, spec)._indexes
    names = [[index.sample_id(sample) for sample in range(len(index.lengths))] for index in indexes]
    _damage(home, next(iter(indexes[PAGES].manifest.sample_shards)))
    lengths = [index.lengths.tolist() for index in indexes]
    walk = Walk(
        seed=SEED,
        names=[f"s{source}" for source in range(SOURCES)],
        lengths=lengths,
        phases=[replace(phase, weights=whole_weights(phase.weights, lengths)) for phase in phases],
        packs_per_step=PACKS_PER_STEP,
        pack_tokens=PACK_TOKENS,
        epochs_max=[EPOCHS_MAX if source == LIMITED else None for source in range(SOURCES)],
        last_step=steps,
    )
    tokenizer = Tokenizer.from_str(open_tokenizer(home.objects, spec, job="").content.decode())
    contents = dict(_contents(folder / "set", tokenizer))
    return Planted(
        home=home,
        job_file=job_file,
        walk=walk,
        names=names,
        contents=contents,
        mixtures=_mixtures(folder, spec),
        border=border,
    )


def _mixtures(folder: Path, spec: TrainingJobSpec) -> list[Path]:
    """Write the records of an attempt that knew the first change alone, and of the one after it."""
    first = first_mixture(spec, entries=1, resume_step=0).model_copy(update={"changes": (), "read": 1})
    paths = [folder / "mixture-1.json", folder / "mixture-2.json"]
    for path, mixture in zip(paths, (first, next_mixture(spec, first, after_step=1)), strict=True):
        path.write_text(mixture.model_dump_json(by_alias=True))
    return paths


def _records(folder: Path, source: int, samples: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(samples):
        name = f"d{source}-{number}"
        if source in {PAGES, PHOTOS}:
            file = f"{name}.png"
            (folder / file).write_bytes(picture(rng.choice(SIDES), rng.choice(SIDES), seed=1000 * source + number))
            yield record(name, [file])
        else:
            yield record(name)
    yield record(f"d{source}-bad", ["missing.png"])


def _job(steps: int, phases: Sequence[Phase]) -> dict[str, Any]:
    crop = {"crop": {"minAreaPercent": 60, "maxStretchPercent": 10}, "color": {"brightnessPercent": 20}}
    named = [
        {"name": f"s{source}", "dataset": f"d{source}", "weight": phases[0].weights[source]}
        | ({"augment": crop} if source == PHOTOS else {"epochsMax": EPOCHS_MAX} if source == LIMITED else {})
        for source in range(SOURCES)
    ]
    schedule = [
        {
            "fromStep": phase.first_step,
            "skipSteps": phase.skip_steps,
            "weights": [{"source": f"s{source}", "weight": weight} for source, weight in enumerate(phase.weights)],
        }
        for phase in phases[1:]
    ]
    data = {
        "sources": named,
        "schedule": schedule,
        "weightsBy": "Tokens",
        "temperature": "2",
        "sequenceTokens": PACK_TOKENS,
        "seed": SEED,
        "waitSeconds": 0,
        "onDamage": "Placeholder",
        "tokenizer": {"vocabulary": 400},
    }
    spec = {
        "model": {"preset": "kimi-vl-nano"},
        "data": data,
        "training": {"steps": steps, "packsPerStep": PACKS_PER_STEP},
    }
    return {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "exact"}, "spec": spec}


def _damage(home: Home, shard: str) -> None:
    """Flip a byte of the first sample of a shard."""
    path = store_folder(home.objects) / blob_key(shard)
    data = bytearray(path.read_bytes())
    data[600] ^= 255
    path.write_bytes(bytes(data))


def _contents(folder: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, tuple[str, str, str | None]]]:
    """Encode every record by itself: its name, and digests of tokens, targets and patches."""
    special = {name: tokenizer.token_to_id(f"<|{name}|>") for name in ("user", "assistant", "end", "media")}
    tokenizer.encode_special_tokens = True
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            question, answer = (
                tokenizer.encode(turn["content"], add_special_tokens=False).ids for turn in entry["conversations"]
            )
            images = [_pixels(folder / name) for name in entry["images"] if (folder / name).exists()]
            media = [special["media"]] * sum(len(pixels) // 4 for pixels in images)
            answered = [*answer, special["end"]]
            asked = [special["user"], *media, *question, special["assistant"]]
            tokens = np.array([*asked, *answered], np.int64)
            targets = np.array([IGNORED] * (len(asked) - 1) + [*answered, IGNORED], np.int64)
            patches = np.concatenate([np.zeros((0, 3 * PATCH_PX**2), np.uint8), *images])
            augmented = path.stem == f"d{PHOTOS}"
            yield entry["id"], (digest(tokens), digest(targets), None if augmented else digest(patches))


def _pixels(path: Path) -> npt.NDArray[np.uint8]:
    """Patches [P, C] of an image whose sides are whole tokens: cut row by row, channels first."""
    pixels_HWC = np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))
    rows, columns = (side // PATCH_PX for side in pixels_HWC.shape[:2])
    cut = pixels_HWC.reshape(rows, PATCH_PX, columns, PATCH_PX, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut.reshape(rows * columns, -1))


def read(
    planted: Planted,
    folder: Path,
    *,
    ranks: int,
    threads: int,
    steps: int,
    kill: random.Random | None,
    appended: bool = True,
) -> bool:
    """Run a reader, and kill it at a random point; whether it has read the last step.

    One that does not know the appended change is stopped before it takes effect.
    """
    last = steps if appended else min(steps, planted.border - 1)
    folder.mkdir(exist_ok=True)
    lines = folder / f"lines-{len(list(folder.glob('lines-*'))):03}"
    words = [planted.home.objects, planted.job_file, planted.mixtures[appended], ranks, last, lines]
    words += [folder / "state.json"]
    environment = {**os.environ, "POLYREME_DATA_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unit.datahub.exact_reader", *map(str, words)]
    log = folder / "log"
    with log.open("a") as errors:
        reader = subprocess.Popen(command, env=environment, stderr=errors)
    until_s = time.monotonic() + LIMIT_S
    while kill is not None and reader.poll() is None and time.monotonic() < until_s:
        if lines.exists() and lines.stat().st_size:
            time.sleep(kill.uniform(0.0, 1.0))
            reader.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    code = reader.wait(LIMIT_S)
    if code not in {0, -signal.SIGKILL}:
        raise AssertionError(f"reader of {ranks} ranks ended with {code}: {log.read_text()[-4000:]}")
    return code == 0 and last == steps


def state_bytes(folder: Path) -> int:
    """Bytes of the newest state, without what names the changes of the weights."""
    state = json.loads((folder / "state.json").read_text())
    return len(json.dumps({name: part for name, part in state.items() if name != "mixture"}, separators=(",", ":")))


def whole_lines(folder: Path) -> list[dict[str, Any]]:
    """What readers wrote, but for lines that a kill has cut."""
    texts = [path.read_text() for path in sorted(folder.glob("lines-*"))]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def verdict(
    planted: Planted, alone: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]], steps: int
) -> dict[str, int]:
    """Compare what was read, by one rank without a stop and by all the others, with the walker's packs.

    Returns:
        ``batches`` that were read; ``mismatched`` ones; ``lost`` and ``repeated`` samples; ``damaged`` samples, whose
        place a placeholder took; ``augmented_visits``; ``limited_visits`` of the source with a limit of epochs.
    """
    expected = dict(enumerate(planted.walk.steps(steps), start=1))
    judge = _Judge(planted)
    mismatched = 0
    for line in [*alone, *seen]:
        mismatched += not all(
            len(pack) == len(visits) and all(map(judge.agrees, visits, pack))
            for visits, pack in zip(expected[line["step"]], line["packs"], strict=True)
        )
    last = {line["step"]: line for line in seen}
    wanted = Counter(
        planted.names[source][sample] for packs in expected.values() for p in packs for source, _, sample in p
    )
    names = [sample[0] for line in last.values() for pack in line["packs"] for sample in pack]
    got = Counter(name.removeprefix(PLACEHOLDER) for name in names)
    return {
        "batches": len(alone) + len(seen),
        "mismatched": mismatched,
        "lost": sum((wanted - got).values()) + steps - len(last),
        "repeated": sum((got - wanted).values()),
        "damaged": len(judge.damaged),
        "augmented_visits": len(judge.augmented),
        "limited_visits": sum(got[name] for name in planted.names[LIMITED]),
    }


class _Judge:
    """Says whether a sample is the one of a visit.

    Args:
        planted: What is expected.
    """

    def __init__(self, planted: Planted) -> None:
        self._planted = planted
        self.augmented: dict[Visit, str] = {}
        """Patches of each visit as they were seen first."""
        self.damaged: set[str] = set()
        self._whole: set[str] = set()

    def agrees(self, visit: Visit, sample: Sequence[str]) -> bool:
        name, *digests = sample
        source, _, number = visit
        wanted = self._planted.names[source][number]
        if name.startswith(PLACEHOLDER):
            self.damaged.add(wanted)
            return name == PLACEHOLDER + wanted and wanted not in self._whole
        self._whole.add(name)
        tokens, targets, patches = self._planted.contents[name]
        if patches is None:
            patches = self.augmented.setdefault(visit, digests[2])
        return name == wanted and name not in self.damaged and digests == [tokens, targets, patches]
