"""An update is the same however ranks shard it, and its state is the same in every layout and after every resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import TOLERANCE, Degrees

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SMALL = 40_000
"""Scalars of a bucket: the model has some twenty of them, and they leave while its backward pass runs."""
MUON = {"name": "Muon", "weight_decay": 0.1}
ZERO1 = {"zero1": True, "bucket_scalars": SMALL}


def step_of(start: Any, root: Path, layout: Degrees, **optimizer: Any) -> Any:
    """Three steps of two microbatches."""
    pipeline = {"microbatches": 2}
    return gradients(start, root, layout, steps=3, optimizer=optimizer, pipeline=pipeline, values=True)


def furthest(seen: Any, expected: Any) -> tuple[float, float]:
    """Largest difference of weights and of moments after three steps, relative to the largest of a tensor.

    Of what AdamW updates the moments alone: it steps by its rate however small a gradient is, also where that is
    rounding and nothing else. A test of the update itself shows that its shares make the bits of the whole.
    """
    assert seen["values"].keys() == expected["values"].keys()
    by_muon = {name.removeprefix("momentum.") for name in expected["values"] if name.startswith("momentum.")}
    assert len(by_muon) > 20
    weights, moments = [], []
    for name, value in expected["values"].items():
        kind, _, parameter = name.partition(".")
        relative = float((seen["values"][name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        if kind != "value":
            moments.append(relative)
        elif parameter in by_muon:
            weights.append(relative)
    return max(weights), max(moments)


def test_sharded_updates_are_those_of_one_process(start: Any, tmp_path: Path) -> None:
    alone = step_of(start, tmp_path / "alone", {"dp": 1}, **MUON)
    seen = step_of(start, tmp_path / "divided", {"dp": 2, "tp": 2, "ep": 2}, **MUON, **ZERO1)
    assert largest_difference(seen, alone) <= TOLERANCE
    weights, moments = furthest(seen, alone)
    assert weights <= TOLERANCE
    assert moments <= 2 * TOLERANCE, "each of three gradients is right to the tolerance"
    assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)


def digests(start: Any, root: Path, name: str, layout: Degrees, **request: Any) -> dict[str, str]:
    output = root / "digests.json"
    gang = start("digests", layout=layout, root=root, resume_from=name, output=str(output), **request)
    assert set(gang.wait()) == {0}, gang.logs()
    found: dict[str, str] = json.loads(output.read_text())
    return found


def test_state_in_bfloat16_divided_and_on_the_host_resumes_bit_for_bit_in_any_layout(
    start: Any, tmp_path: Path
) -> None:
    narrow = {"precision": "bfloat16", "steps": 4, "interval": 2, "kept": 3}
    held = {**MUON, **ZERO1, "state_on_host": True, "schedule": "Cosine", "final_learning_rate": 1e-4}
    whole = {**held, "zero1": False}
    layout: Degrees = {"dp": 4, "ep": 2}
    done = start(
        "train", layout=layout, root=tmp_path, optimizer=held, questions=2, export=str(tmp_path / "export"), **narrow
    )
    assert done.wait() == [0] * 4, done.logs()
    assert json.loads((tmp_path / "export" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    first, last = "a000001-s00000002", "a000001-s00000004"
    again = start("train", layout=layout, root=tmp_path, attempt=2, resume_from=first, optimizer=held, **narrow)
    assert again.wait() == [0] * 4, again.logs()
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / "steps" / f"a00000{attempt}.jsonl").read_text().splitlines()]
        for attempt in (1, 2)
    ]
    assert losses[1] == losses[0][2:]
    narrow = {"precision": "bfloat16"}
    same = digests(start, tmp_path, last, {"dp": 1}, optimizer=whole, **narrow)
    assert len(set(same.values())) > len(same) // 2, "tensors differ, moments are not all zero"
    assert digests(start, tmp_path, "a000002-s00000004", {"dp": 1}, optimizer=whole, **narrow) == same
    # Originals are float32 in every checkpoint: one of a narrow model is one of a wide one.
    assert digests(start, tmp_path, last, {"dp": 2, "tp": 2, "ep": 4}, optimizer=held) == same
