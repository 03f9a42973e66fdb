"""A checkpoint that lost its marker or a file is named and never loaded, by any command."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.polyreme_home import STEPS, PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

CANCELLED = 6


def test_a_torn_checkpoint_is_named_and_never_loaded(home: PolyremeHome, truth: dict[int, str]) -> None:
    every = 4
    job = home.write_job("torn", checkpoint={"everySteps": every, "keep": 3})
    first = home.start(job, background=True)
    first.until(lambda: len(first.committed(1)) >= 2, "two checkpoints are committed")
    with ThreadPoolExecutor(1) as other:
        with first.held(attempt=1, steps=2 * every + 1):
            stopping = other.submit(home.call, "runs", "stop", "torn")
            first.until(lambda: "stopping" in first.said, "it says that it stops")
            first.until(first.is_asked_to_end, "a rank is asked to end")
        stopped = stopping.result()
    assert stopped.code == 0, stopped.said
    assert first.end().code == CANCELLED

    *_, before, emptied, unmarked = first.committed(1)
    (unmarked / "COMMIT.json").unlink()
    max(emptied.iterdir(), key=lambda path: path.stat().st_size).unlink()
    rows = {row["name"]: row["committed"] for row in home.call("checkpoint", "ls", "torn", "-o", "json").item}
    assert (rows[before.name], rows[emptied.name], rows[unmarked.name]) == (True, False, False)

    ended = home.start(job).end()
    assert ended.code == 0, ended.said
    assert home.newest_point("torn") == before.name
    logs = home.call("runs", "logs", "torn").output
    assert emptied.name in logs
    assert unmarked.name in logs
    assert len(home.losses("torn")) == STEPS
    assert home.losses("torn") == truth
