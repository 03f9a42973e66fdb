"""The smallest jobs, and a dataset of a user's own: one rank, a few steps, sixty pictures in four colours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

COLOURS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (30, 60, 200), "yellow": (230, 210, 40)}
RECORDS = 60
SEQUENCE_TOKENS = 96

STORE_LOST_AT_ONCE: dict[str, Any] = {
    "failurePolicy": {"maxRestarts": 1, "noProgressMax": 1, "backoff": {"initialSeconds": 1, "maxSeconds": 1}}
}


def small(dataset: str, *, steps: int = 2, data: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Parts of a spec for one rank that trains a few steps."""
    return {
        "data": {
            "sequenceTokens": SEQUENCE_TOKENS,
            "seed": 3,
            "sources": [{"name": "own", "dataset": dataset}],
            "waitSeconds": 60,
            **(data or {}),
        },
        "training": {"steps": steps, "packsPerStep": 1, "seed": 1},
        "parallelism": {"mode": "Auto"},
        "workers": {"replicas": 1, "devices": 1},
        "checkpoint": {"everySteps": 2, "keep": 3},
        **spec,
    }


def write_records(folder: Path) -> list[dict[str, Any]]:
    """Draw the pictures; return their records."""
    folder.mkdir(parents=True)
    records = []
    for at in range(RECORDS):
        colour = list(COLOURS)[at % len(COLOURS)]
        name = f"{at:02d}.{'png' if at % 2 else 'jpg'}"
        Image.new("RGB", (28 + at % 3 * 28, 28 + at % 2 * 28), COLOURS[colour]).save(folder / name)
        records.append(record(f"picture-{at:02d}", [name], colour))
    return records


def record(sample_id: str, images: list[str], answer: str, **fields: Any) -> dict[str, Any]:
    """One record: a question and its answer."""
    turns = [
        {"role": "user", "content": "Which of these four colours fills the picture?"},
        {"role": "assistant", "content": f"The picture is filled with {answer}."},
    ]
    return {"id": sample_id, "images": images, "conversations": turns, **fields}


def write_jsonl(path: Path, lines: list[dict[str, Any] | str]) -> Path:
    """Write records, and lines that are none."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path
