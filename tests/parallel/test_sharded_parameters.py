"""Sharded parameters train the model of one process, and are whole parameters for exports and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import TOLERANCE

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

ROWS = {"parameter_sharding": "FSDP2"}
COPIES = {"dp": 2}


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_rows_in_bfloat16_resume_answer_export_and_load_elsewhere_bit_for_bit(start: Any, tmp_path: Path) -> None:
    """Originals are float32 rows, and layers are recomputed; one rank has more questions than the other."""
    narrow = {"precision": "bfloat16"}
    run = {**narrow, **ROWS, "steps": 3, "interval": 2, "kept": 3, "recompute": "full"}
    done = start("train", layout=COPIES, root=tmp_path, questions=7, export=str(tmp_path / "own"), **run)
    assert done.wait() == [0] * 2, done.logs()
    again = start("train", layout=COPIES, root=tmp_path, attempt=2, resume_from="a000001-s00000002", **run)
    assert again.wait() == [0] * 2, again.logs()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / "steps" / f"a00000{attempt}.jsonl").read_text().splitlines()]
        for attempt in (1, 2)
    ]
    assert losses[1] == losses[0][2:]
    last = "a000001-s00000003"
    names = [last, "a000002-s00000003"]
    found = tmp_path / "digests.json"
    loaded = start(
        "digests",
        layout={"dp": 2},
        root=tmp_path,
        names=names,
        resume_from=last,
        output=str(found),
        optimizer={"zero1": True},
    )
    assert loaded.wait() == [0] * 2, loaded.logs()
    whole, resumed = (json.loads(found.read_text())[name] for name in names)
    assert resumed == whole
    assert len(set(whole.values())) > len(whole) // 2, "tensors differ, moments are not all zero"
    offline = start("offline", layout=(1, 1), root=tmp_path, resume_from=last, output=str(tmp_path / "off"), **narrow)
    assert offline.wait() == [0], offline.logs()
    assert files(tmp_path / "off") == files(tmp_path / "own")
    pages = json.loads((tmp_path / "evaluation" / "a000001.json").read_text())["pages"]
    assert [page["sampleId"] for page in pages] == [f"page-{number}" for number in range(7)]


def test_planted_bugs_in_rows_are_caught(start: Any, tmp_path: Path) -> None:
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=1)
    bugs = {
        "rows are divided by their ranks": {"dp": 2},
        "rows of experts are not summed over their copies": {"dp": 4, "ep": 2},
    }
    for bug, layout in bugs.items():
        broken = gradients(start, tmp_path / bug, layout, steps=1, bug=bug, **ROWS)
        assert largest_difference(broken, alone) > 100 * TOLERANCE, bug
    kept = gradients(start, tmp_path / "kept", {"dp": 2}, steps=1, bug="layers stay gathered", **ROWS)
    assert kept["gathered"] > 1
