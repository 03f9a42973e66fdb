"""Whatever ends a rank, and whenever: the next attempt goes on bit for bit, and nothing half-written is ever loaded."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.history import (
    COMMIT_MARKER,
    ResumePoint,
    attempt_key,
    checkpoint_name,
    choose_resume,
    committed_steps,
)
from polyreme_api.progress import StepRecord
from tests.roots import list_checkpoints, read_resume_points

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

LAYOUT = (4, 2)
STEPS = 12
WAIT_S_MAX = 60.0
BEFORE_THE_FENCE = {"rank": 0, "how": {"what": "stop", "at": "INDEX.json", "after": True}}
BEFORE_THE_MARKER = {"rank": 0, "how": {"what": "stop", "at": "COMMIT.json"}}
"""Where rank 0 stops in its first commit: before it looks for a newer attempt, or between that and its marker."""


def fix_resume(root: Path, attempt: int) -> str | None:
    """Do what a leader does: choose where an attempt begins, once."""
    root.mkdir(parents=True, exist_ok=True)
    chosen = choose_resume(list_checkpoints(root)[0], read_resume_points(root))
    name = None if chosen is None else checkpoint_name(chosen)
    path = root / attempt_key(attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(ResumePoint(attempt=attempt, resume_from=name).model_dump_json(by_alias=True))
    return name


def history(root: Path) -> dict[int, float]:
    records = {
        int(path.stem[1:]): [StepRecord.model_validate_json(line) for line in path.read_text().splitlines()]
        for path in (root / "steps").glob("a*.jsonl")
    }
    return {record.step: record.loss for record in committed_steps(read_resume_points(root), records)}


def begin(start: Any, root: Path, attempt: int, **request: Any) -> Any:
    resume_from = fix_resume(root, attempt)
    return start("train", layout=LAYOUT, root=root, attempt=attempt, resume_from=resume_from, steps=STEPS, **request)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    limit = time.monotonic() + WAIT_S_MAX
    while not holds():
        assert time.monotonic() < limit, f"waited {WAIT_S_MAX} s: {what}"
        time.sleep(0.01)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def undisturbed(start: Any, tmp_path: Path) -> dict[int, float]:
    root = tmp_path / "undisturbed"
    assert begin(start, root, 1).wait() == [0, 0, 0, 0]
    return history(root)


def test_losses_after_kills_and_resumes_are_those_of_an_undisturbed_run(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "disturbed"

    before_the_first_checkpoint = begin(start, root, 1, faults={2: "kill"}, fault_rank=3)
    assert before_the_first_checkpoint.wait() == [7, 7, 7, -signal.SIGKILL], "survivors lost a peer, and say so"
    assert "exchange with other ranks failed: rank 0 of 4 lost a peer" in before_the_first_checkpoint.logs()

    during_a_write = begin(start, root, 2, store_fault=BEFORE_THE_FENCE)
    until(lambda: stopped(during_a_write.processes[0].pid), "rank 0 stops in its first commit")
    during_a_write.kill()
    assert [checkpoint_name(torn) for torn in list_checkpoints(root)[1]] == ["a000002-s00000004"]

    between_steps = begin(start, root, 3, faults={8: "kill"}, fault_rank=0)
    assert between_steps.wait() == [-signal.SIGKILL, 7, 7, 7]
    assert "torn checkpoint ignored: a000002-s00000004" in between_steps.logs()

    last = begin(start, root, 4)
    assert last.wait() == [0, 0, 0, 0]
    assert read_resume_points(root)[3].resume_from == "a000003-s00000004"
    assert history(root) == undisturbed


def test_a_request_to_stop_reaches_all_ranks_at_one_step_and_loses_nothing(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "stopped"
    assert begin(start, root, 1, faults={6: "stop"}, fault_rank=2).wait() == [75] * 4
    assert (root / "a000001-s00000006" / COMMIT_MARKER).exists()
    assert begin(start, root, 2).wait() == [0] * 4
    assert history(root) == undisturbed


def test_half_as_many_ranks_go_on_with_the_same_packs_and_losses(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "smaller"
    assert begin(start, root, 1, faults={6: "stop"}).wait() == [75] * 4
    resume_from = fix_resume(root, 2)
    assert resume_from == "a000001-s00000006"
    smaller = {"layout": (2, 2), "root": root, "attempt": 2, "resume_from": resume_from, "steps": STEPS}
    assert start("train", **smaller).wait() == [0] * 2
    losses = history(root)
    assert [losses[step] for step in range(1, 7)] == [undisturbed[step] for step in range(1, 7)]
    assert losses == pytest.approx(undisturbed, rel=1e-4)
    assert losses[12] != losses[11]


def test_a_request_to_save_makes_a_checkpoint_and_training_goes_on(start: Any, tmp_path: Path) -> None:
    assert begin(start, tmp_path, 1, faults={6: "save"}, fault_rank=1, kept=9).wait() == [0] * 4
    assert [c.step for c in list_checkpoints(tmp_path)[0]] == [4, 6, 8, 12]


def test_a_stopped_rank_that_wakes_after_its_successor_commits_nothing(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "late"
    old = begin(start, root, 1, store_fault=BEFORE_THE_FENCE)
    until(lambda: stopped(old.processes[0].pid), "rank 0 stops in its first commit")
    assert begin(start, root, 2).wait() == [0] * 4
    os.kill(old.processes[0].pid, signal.SIGCONT)
    assert old.wait() == [17] * 4, old.logs()
    committed = list_checkpoints(root)[0]
    assert [(c.attempt, c.step) for c in committed] == [(2, 4), (2, 8), (2, 12)], "the late rank deleted nothing"
    assert history(root) == undisturbed


def test_a_commit_that_lands_after_the_next_attempt_has_begun_is_no_history(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "late"
    old = begin(start, root, 1, store_fault=BEFORE_THE_MARKER)
    until(lambda: stopped(old.processes[0].pid), "rank 0 stops between its look for a newer attempt and its marker")
    assert fix_resume(root, 2) is None
    os.kill(old.processes[0].pid, signal.SIGCONT)
    assert old.wait() == [17] * 4, old.logs()
    committed, points = list_checkpoints(root)[0], read_resume_points(root)
    assert [(c.attempt, c.step) for c in committed] == [(1, 4)], "the late commit landed"
    assert choose_resume(committed, points) is None, "and counts for nothing"
    assert start("train", layout=LAYOUT, root=root, attempt=2, steps=STEPS).wait() == [0] * 4
    assert history(root) == undisturbed


def test_a_rank_of_an_old_attempt_does_not_begin(start: Any, tmp_path: Path) -> None:
    fix_resume(tmp_path, 1)
    fix_resume(tmp_path, 2)
    assert start("train", layout=(1, 1), attempt=1).wait() == [17]


def test_a_loss_that_is_no_number_ends_all_ranks_with_its_step(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, infinite_at=3)
    assert gang.wait() == [100] * 4
    assert "loss or gradient is not finite: loss nan, gradient norm nan in step 3" in gang.logs()
    assert list(history(tmp_path)) == [1, 2]


def test_a_full_disk_ends_the_attempt_after_the_second_failed_checkpoint_and_can_go_on(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "full"
    full = begin(start, root, 1, full_disk_rank=1)
    assert full.wait() == [7] * 4, full.logs()
    assert "checkpoint failed (1 in a row" in full.logs()
    assert "checkpoints failed: 2 in a row, the last by rank 1: " in full.logs()
    assert list_checkpoints(root)[0] == []
    assert begin(start, root, 2).wait() == [0] * 4
    assert history(root) == undisturbed


def test_held_out_questions_are_answered_once_each_and_the_model_is_exported(start: Any, tmp_path: Path) -> None:
    export = tmp_path / "export"
    gang = begin(start, tmp_path, 1, questions=7, export=str(export))
    assert gang.wait() == [0] * 4, gang.logs()
    result = json.loads((tmp_path / "evaluation" / "a000001.json").read_text())
    assert [page["sampleId"] for page in result["pages"]] == [f"page-{number}" for number in range(7)]
    assert result["exactMatchRatio"] == sum(page["match"] for page in result["pages"]) / 7
    assert (export / "config.json").exists()
    phases = [json.loads(line)["phase"] for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(phases)) == ["Loading", "Training", "Checkpointing", "Evaluating", "Exporting", "Done"]
