"""A save that breaks inside a file: killed, refused by the disk, or hanging, on one rank only."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from polyreme_trainer.checkpoint.directory import list_checkpoints
from tests.parallel.test_resume import begin, history, until

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

PLACES = [
    (2, "__2_0.distcp", 0),
    (2, "__2_0.distcp", 5_000),
    (3, "__3_0.distcp", 200_000),
    (0, "__0_0.distcp", 1_000_000),
    (0, ".metadata.tmp", 3_000),
]
"""Rank, file, and bytes of it that are written before the end."""


def test_a_kill_at_any_byte_of_a_file_leaves_a_torn_directory_that_is_never_loaded(start: Any, tmp_path: Path) -> None:
    assert begin(start, tmp_path / "undisturbed", 1).wait() == [0] * 4
    root = tmp_path / "killed"
    for attempt, (rank, file, at_bytes) in enumerate(PLACES, start=1):
        broken = {"rank": rank, "file": file, "at_bytes": at_bytes, "how": "kill"}
        gang = begin(start, root, attempt, broken_file=broken)
        codes = gang.wait()
        assert codes[rank] == -signal.SIGKILL, (file, at_bytes, codes)
        assert 0 not in codes, (file, at_bytes, codes)
        assert (root / f"a{attempt:06d}-s00000004" / file).stat().st_size == at_bytes
    committed, torn = list_checkpoints(root)
    assert (committed, len(torn)) == ([], len(PLACES))
    last = begin(start, root, len(PLACES) + 1)
    assert last.wait() == [0] * 4
    assert history(root) == history(tmp_path / "undisturbed")
    assert list_checkpoints(root)[1] == [], "what was torn is cleared after the first good save"


def test_one_failed_save_is_known_to_all_ranks_and_training_goes_on(start: Any, tmp_path: Path) -> None:
    broken = {"rank": 1, "file": "s00000004/__1_0.distcp", "at_bytes": 1_000, "how": "fail"}
    gang = begin(start, tmp_path, 1, broken_file=broken)
    assert gang.wait() == [0] * 4, gang.logs()
    committed, torn = list_checkpoints(tmp_path)
    assert ([(c.attempt, c.step) for c in committed], torn) == ([(1, 8), (1, 12)], [])
    for rank in range(4):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert "checkpoint failed (1 in a row, 2 end the attempt): rank 1: [Errno 5]" in log, rank
    assert list(history(tmp_path)) == list(range(1, 13))


def test_failed_saves_that_are_not_in_a_row_do_not_end_the_attempt(start: Any, tmp_path: Path) -> None:
    broken = {"rank": 0, "file": "4/.metadata.tmp", "at_bytes": 0, "how": "fail"}
    gang = begin(start, tmp_path, 1, broken_file=broken, interval=2)
    assert gang.wait() == [0] * 4, gang.logs()
    assert [c.step for c in list_checkpoints(tmp_path)[0]] == [8, 10, 12]


def test_a_rank_that_hangs_in_a_save_ends_the_others_by_the_timeout_of_the_step(start: Any, tmp_path: Path) -> None:
    broken = {"rank": 3, "file": "__3_0.distcp", "at_bytes": 1_000, "how": "stop"}
    gang = begin(start, tmp_path, 1, broken_file=broken, collective_timeout_s=3.0)
    others = gang.processes[:3]
    until(lambda: not any(process.is_alive() for process in others), "the other ranks end")
    assert all(process.exitcode not in {0, None} for process in others)
    assert list_checkpoints(tmp_path)[0] == []
