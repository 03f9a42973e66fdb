"""Losses of a run whose ranks are killed, stopped or resized equal those of an undisturbed run, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.history import COMMIT_MARKER, checkpoint_name
from tests.parallel.attempts import STEPS, begin, fix_resume, history
from tests.parallel.faults import at_write
from tests.roots import at, list_checkpoints, read_resume_points

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

KILLS: list[tuple[int, signal.Signals, dict[str, Any]]] = [
    (3, signal.SIGKILL, {"faults": {2: "kill"}, "fault_rank": 3}),
    (2, signal.SIGKILL, at_write(2, "kill", "/00002-000.bin")),
    (3, signal.SIGXFSZ, {"killed_at": {"3": 200_000}}),
    (0, signal.SIGKILL, at_write(0, "kill", "INDEX.json", after=True)),
    (0, signal.SIGKILL, at_write(0, "kill", "COMMIT.json")),
    (0, signal.SIGKILL, at_write(0, "kill", "COMMIT.json", after=True)),
    (0, signal.SIGKILL, {"faults": {7: "kill"}, "fault_rank": 0}),
]
"""Which rank is killed in each attempt, by what, and where: before the first checkpoint, before its file, inside it,
after the index, before the marker, after the marker, between two checkpoints."""
COMMITTED = 6
"""The attempt that dies just after its marker."""


def test_losses_after_a_kill_at_any_point_are_those_of_an_undisturbed_run(
    start: Any, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    for attempt, (rank, how, request) in enumerate(KILLS, start=1):
        gang = begin(start, tmp_path, attempt, **request)
        codes = gang.wait()
        assert codes[rank] == -how, (request, codes)
        assert 0 not in codes, (request, codes)
        committed, torn = list_checkpoints(tmp_path)
        assert committed == ([] if attempt < COMMITTED else [at(COMMITTED, 4)]), request
        if attempt == 1:
            assert codes == [7, 7, 7, -signal.SIGKILL], "survivors lost a peer, and say so"
            assert "communication with other ranks failed: rank 0 of 4 lost a peer" in gang.logs()
        elif attempt == COMMITTED - 1:
            assert {at(4, 4), at(5, 4)} <= set(torn), "rank 0 died with every file written"

    last = begin(start, tmp_path, len(KILLS) + 1)
    assert last.wait() == [0] * 4, last.logs()
    assert "torn checkpoint ignored: a000005-s00000004: no COMMIT.json" in last.logs()
    resumed = [point.resume_from for point in read_resume_points(tmp_path)]
    assert resumed == [None] * COMMITTED + [checkpoint_name(at(COMMITTED, 4))] * 2, "what is torn is never loaded"
    assert history(tmp_path) == undisturbed
    assert list_checkpoints(tmp_path)[1] == [], "what is torn is cleared after a good save"


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
