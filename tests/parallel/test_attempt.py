"""One attempt, except its steps: save on request, answer held-out questions, export, and stop on a bad loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.checkpoint_inventory import survey
from polyreme_api.history import steps_key
from polyreme_api.progress import ALL_SETS, StepRecord
from polyreme_datahub.objects import open_store
from tests.parallel.attempts import begin, history
from tests.roots import list_checkpoints

PHASES = ["Starting", "Loading", "Training", "Checkpointing", "Evaluating", "Exporting", "Done"]
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_a_request_to_save_makes_a_checkpoint_and_training_goes_on(start: Any, tmp_path: Path) -> None:
    assert begin(start, tmp_path, 1, faults={6: "save"}, fault_rank=1, kept=9).wait() == [0] * 4
    assert [c.step for c in list_checkpoints(tmp_path)[0]] == [4, 6, 8, 12]


def test_a_loss_that_is_no_number_ends_all_ranks_with_its_step(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, infinite_at=3)
    assert gang.wait() == [101] * 4
    assert "loss or gradient is not finite: loss nan, gradient norm nan in step 3" in gang.logs()
    assert list(history(tmp_path)) == [1, 2]


def test_the_best_checkpoints_are_those_with_a_held_out_loss(start: Any, tmp_path: Path) -> None:
    """Step 4 measures none, so its checkpoint is deleted when it is not the newest any more."""
    gang = begin(start, tmp_path, 1, questions=3, evaluated_every=8, kept=1, best=3)
    assert gang.wait() == [0] * 4, gang.logs()
    lines = (tmp_path / steps_key(1)).read_text().splitlines()
    records = [StepRecord.model_validate_json(line) for line in lines]
    measured = {record.step: record.held_out[ALL_SETS] for record in records if record.held_out}
    saved = survey(open_store(tmp_path.as_uri())).checkpoints
    assert {stored.reference.step: stored.held_out_loss for stored in saved} == measured
    assert list(measured) == [8, 12]


def test_held_out_questions_are_answered_once_each_and_the_model_is_exported(start: Any, tmp_path: Path) -> None:
    export = tmp_path / "export"
    gang = begin(start, tmp_path, 1, questions=7, export=str(export))
    assert gang.wait() == [0] * 4, gang.logs()
    result = json.loads((tmp_path / "evaluation" / "a000001.json").read_text())
    assert [page["sampleId"] for page in result["pages"]] == [f"page-{number}" for number in range(7)]
    assert result["exactMatchRatio"] == sum(page["match"] for page in result["pages"]) / 7
    assert (export / "config.json").exists()
    phases = [json.loads(line)["phase"] for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(phases)) == PHASES
