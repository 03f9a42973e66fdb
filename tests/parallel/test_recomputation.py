"""A rank that computes wrongly: the step in which it shows is computed again, on it and on another, and it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.progress import StepRecord
from tests.parallel.attempts import begin, history

MEASURED: dict[str, Any] = {"spikes": {"window_steps": 8, "deviations": 4, "update_norm_steps": 1}}
STEP, WRONG = 10, 2
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def records(root: Path) -> dict[int, StepRecord]:
    lines = (root / "steps" / "a000001.jsonl").read_text().splitlines()
    return {record.step: record for record in map(StepRecord.model_validate_json, lines)}


def test_a_fault_that_passes_names_its_rank_and_is_in_no_update(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    gang = begin(start, tmp_path, 1, **MEASURED, wrong={"rank": WRONG, "how": {"step": STEP, "times": 1}})
    assert gang.wait() == [0] * 4, gang.logs()
    found = records(tmp_path)
    assert found[STEP].recomputed.startswith(f"computed again, rank {WRONG} (")
    assert found[STEP].recomputed.endswith("had another result: a fault that passed")
    assert found[STEP].spike_limit is None, "computed again it was none"
    assert [step for step, record in found.items() if record.recomputed] == [STEP]
    assert history(tmp_path) == undisturbed


def test_a_fault_that_lasts_is_found_on_the_packs_of_a_neighbour(start: Any, tmp_path: Path) -> None:
    lasting = {"rank": WRONG, "how": {"step": STEP, "times": 100}}
    gang = begin(start, tmp_path, 1, **MEASURED, images_over="Context", steps=STEP, wrong=lasting)
    assert gang.wait() == [0] * 4, gang.logs()
    found = records(tmp_path)[STEP]
    assert found.recomputed.startswith(f"computed again on other ranks, rank {WRONG} (")
    assert found.spike_limit is not None


def test_corrupted_packs_are_wrong_on_every_rank_and_name_none(start: Any, tmp_path: Path) -> None:
    """Under ZeRO-1, whose exchanges begin while the backward runs, and with two pipeline stages."""
    divided = {
        "layout": {"dp": 2, "pp": 2},
        "pipeline": {"schedule": "1F1B", "layers": (1, 2), "microbatches": 2},
        "images_over": "Context",
        "optimizer": {"zero1": True, "bucket_scalars": 40_000},
    }
    gang = start("train", root=tmp_path, steps=STEP, corrupted_at=STEP, **MEASURED, **divided)
    assert gang.wait() == [0] * 4, gang.logs()
    found = records(tmp_path)[STEP]
    assert found.recomputed == "computed again on the same and on other ranks, the result is the same"
    assert found.spike_limit is not None
