"""The bits of a loss hang on data and weights alone: not on the heap, and not on where a batch lies in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.history import steps_key
from polyreme_api.progress import StepRecord

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

STEPS = 5


def losses(start: Any, root: Path, **request: Any) -> list[tuple[float, float]]:
    gang = start("train", layout=(2, 2), root=root, steps=STEPS, interval=STEPS, **request)
    assert gang.wait() == [0, 0], gang.logs()
    lines = (root / steps_key(1)).read_text().splitlines()
    records = [StepRecord.model_validate_json(line) for line in lines]
    return [(record.loss, record.gradient_norm) for record in records]


def test_five_steps_have_the_same_bits_in_whatever_state_the_heap_is(start: Any, tmp_path: Path) -> None:
    aligned = losses(start, tmp_path / "aligned")
    assert len(aligned) == STEPS
    for begin_bytes, litter in [(8, 0), (16, 1), (40, 2), (56, 3)]:
        root = tmp_path / f"{begin_bytes}-{'x' * 40 * litter}"
        assert losses(start, root, begin_bytes=begin_bytes, litter=litter) == aligned, (begin_bytes, litter)


def test_a_batch_that_is_not_copied_is_seen(start: Any, tmp_path: Path) -> None:
    seen = {
        tuple(losses(start, tmp_path / str(begin), begin_bytes=begin, bug="batches are not copied"))
        for begin in (0, 8, 16, 40)
    }
    assert len(seen) > 1
