"""A save that breaks at any of its writes or inside one: killed, refused by the store, or hanging, on one rank only."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.test_resume import begin, history, until
from tests.roots import at, list_checkpoints

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def fault(rank: int, what: str, key: str, **how: Any) -> dict[str, Any]:
    return {"store_fault": {"rank": rank, "how": {"what": what, "at": key, **how}}}


KILLS: list[tuple[int, signal.Signals, dict[str, Any]]] = [
    (2, signal.SIGKILL, fault(2, "kill", "/00002-000.bin")),
    (3, signal.SIGXFSZ, {"killed_at": {"3": 200_000}}),
    (0, signal.SIGKILL, fault(0, "kill", "INDEX.json", after=True)),
    (0, signal.SIGKILL, fault(0, "kill", "COMMIT.json")),
]
"""Who is killed, by what, and where: before its file, inside it, behind the index, before the marker."""


def test_a_kill_at_any_write_leaves_a_torn_checkpoint_that_is_never_loaded(start: Any, tmp_path: Path) -> None:
    assert begin(start, tmp_path / "undisturbed", 1).wait() == [0] * 4
    root = tmp_path / "killed"
    for attempt, (rank, how, request) in enumerate(KILLS, start=1):
        codes = begin(start, root, attempt, **request).wait()
        assert codes[rank] == -how, (request, codes)
        assert 0 not in codes, (request, codes)
    committed, torn = list_checkpoints(root)
    assert committed == []
    assert {at(3, 4), at(4, 4)} <= set(torn), "rank 0 died with every file written"
    after_the_marker = begin(start, root, len(KILLS) + 1, **fault(0, "kill", "COMMIT.json", after=True)).wait()
    assert after_the_marker[0] == -signal.SIGKILL
    assert list_checkpoints(root)[0] == [at(5, 4)]
    last = begin(start, root, len(KILLS) + 2)
    assert last.wait() == [0] * 4
    assert "torn checkpoint ignored: a000004-s00000004: no COMMIT.json" in last.logs()
    assert history(root) == history(tmp_path / "undisturbed")
    assert list_checkpoints(root)[1] == [], "what was torn is cleared after the first good save"


def test_one_failed_save_is_known_to_all_ranks_and_training_goes_on(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, **fault(1, "fail", "s00000004/00001-000.bin"))
    assert gang.wait() == [0] * 4, gang.logs()
    committed, torn = list_checkpoints(tmp_path)
    assert ([(c.attempt, c.step) for c in committed], torn) == ([(1, 8), (1, 12)], [])
    for rank in range(4):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert "checkpoint failed (1 in a row, 2 end the attempt): rank 1: object store failed" in log, rank
    assert list(history(tmp_path)) == list(range(1, 13))


def test_failed_saves_that_are_not_in_a_row_do_not_end_the_attempt(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, **fault(0, "fail", "4/INDEX.json"), interval=2)
    assert gang.wait() == [0] * 4, gang.logs()
    assert [c.step for c in list_checkpoints(tmp_path)[0]] == [8, 10, 12]


def test_a_rank_that_hangs_in_a_save_ends_the_others_by_the_timeout_of_the_step(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, **fault(3, "stop", "00003-000.bin"), collective_timeout_s=3.0)
    others = gang.processes[:3]
    until(lambda: not any(process.is_alive() for process in others), "the other ranks end")
    assert all(process.exitcode not in {0, None} for process in others)
    assert list_checkpoints(tmp_path)[0] == []
