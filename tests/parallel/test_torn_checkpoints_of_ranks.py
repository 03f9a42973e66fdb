"""A save that one rank breaks, or an older attempt ends late: nothing half-written or late is ever loaded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.history import choose_resume
from tests.parallel.attempts import LAYOUT, STEPS, begin, fix_resume, history, stopped, until
from tests.parallel.faults import at_write
from tests.roots import list_checkpoints, read_resume_points

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

BEFORE_THE_FENCE = at_write(0, "stop", "INDEX.json", after=True)
BEFORE_THE_MARKER = at_write(0, "stop", "COMMIT.json")
"""Where rank 0 stops in its first commit: before it looks for a newer attempt, or between that and its marker."""


def test_one_failed_save_is_known_to_all_ranks_and_training_goes_on(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, **at_write(1, "fail", "s00000004/00001-000.bin"))
    assert gang.wait() == [0] * 4, gang.logs()
    committed, torn = list_checkpoints(tmp_path)
    assert ([(c.attempt, c.step) for c in committed], torn) == ([(1, 8), (1, 12)], [])
    for rank in range(4):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert "checkpoint failed (1 in a row, 2 end the attempt): rank 1: object store failed" in log, rank
    assert list(history(tmp_path)) == list(range(1, 13))


def test_failed_saves_that_are_not_in_a_row_do_not_end_the_attempt(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, **at_write(0, "fail", "4/INDEX.json"), interval=2)
    assert gang.wait() == [0] * 4, gang.logs()
    assert [c.step for c in list_checkpoints(tmp_path)[0]] == [8, 10, 12]


def test_a_rank_that_hangs_in_a_save_ends_the_others_by_the_timeout_of_the_step(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, **at_write(3, "stop", "00003-000.bin"), collective_timeout_s=3.0)
    others = gang.processes[:3]
    until(lambda: not any(process.is_alive() for process in others), "the other ranks end")
    assert all(process.exitcode not in {0, None} for process in others)
    assert list_checkpoints(tmp_path)[0] == []


def test_a_stopped_rank_that_wakes_after_its_successor_commits_nothing(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    root = tmp_path / "late"
    old = begin(start, root, 1, **BEFORE_THE_FENCE)
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
    old = begin(start, root, 1, **BEFORE_THE_MARKER)
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
