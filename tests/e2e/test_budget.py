"""A run that fails for good says why, ends with its own code, and leaves a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

RUN_FAILED = 100


def test_a_run_that_used_up_its_restarts_fails_with_the_reason_and_a_report(home: PolyremeHome) -> None:
    job = home.write_job("hopeless", failurePolicy={"maxRestarts": 1})
    ended = home.start(job, "--inject", "kill-rank=2@3", "--inject", "kill-rank=3@12").end()
    assert ended.code == RUN_FAILED, ended.said
    assert ended.item["state"] == "Failed"
    assert ended.item["attempts"] == 2
    assert "rank 3 on worker 1" in ended.item["message"]

    shown = home.call("runs", "show", "hopeless", "-o", "json").item
    failed = next(entry for entry in shown["status"]["conditions"] if entry["type"] == "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "MaxRestartsExceeded")
    assert "hopeless" in Path(shown["report"]).read_text()

    again = home.call("run", str(job))
    assert again.code == RUN_FAILED, "a failed run is finished"
    assert "--fresh" in again.said
