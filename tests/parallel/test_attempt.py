"""One attempt, except its steps: save on request, answer held-out questions, export, and stop on a bad loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.checkpoint_inventory import survey
from polyreme_api.history import steps_key
from polyreme_api.progress import ALL_SETS, ProgressRecord, StepRecord
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


def test_an_attempt_that_resumes_ends_early_at_the_same_step(start: Any, tmp_path: Path) -> None:
    """No loss falls by 1,000: steps 4 and 6 miss that of step 2. Attempt 1 is killed after the checkpoint of step 4."""
    asked = {"questions": 3, "evaluated_every": 2, "early_stop": {"patience": 2, "min_delta": 1000.0}}
    assert begin(start, tmp_path, 1, faults={6: "kill"}, **asked).wait() != [0] * 4
    for attempt in (2, 3):
        gang = begin(start, tmp_path, attempt, **asked)
        assert gang.wait() == [0] * 4, gang.logs()
        assert list(history(tmp_path)) == [1, 2, 3, 4, 5, 6]
        assert json.loads((tmp_path / "evaluation" / f"a{attempt:06d}.json").read_text())["step"] == 6
        last = ProgressRecord.model_validate_json((tmp_path / "progress.jsonl").read_text().splitlines()[-1])
        assert last.stopped_early.endswith("(step 2) in 2 measurements")
    assert survey(open_store(tmp_path.as_uri())).checkpoints[-1].reference.step == 6


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
