"""A run whose held-out loss no longer falls ends before its last step, and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyreme.run_files.paths import Home
from tests.e2e.polyreme_home import PolyremeHome
from tests.e2e.small_jobs import small, write_jsonl, write_records

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

SETS = [{"name": "seen", "dataset": "improving-held-out"}]


def test_a_run_that_no_longer_improves_ends_early_and_says_so(home: PolyremeHome, tmp_path: Path) -> None:
    """No loss falls by 1,000, so the second and third measurements do not count as lower."""
    folder = tmp_path / "pictures"
    records = write_records(folder)
    for name, part in (("improving", records[:40]), ("improving-held-out", records[40:])):
        write_jsonl(folder / f"{name}.jsonl", list(part))
        assert home.call("data", "register", name, str(folder / f"{name}.jsonl")).code == 0
    stop = {"patience": 2, "minDelta": "1000"}
    evaluation = {"everySteps": 2, "samplesMax": 4, "sets": SETS, "earlyStop": stop}
    ended = home.start(home.write_job("early", **small("improving", steps=20, evaluation=evaluation))).end()
    assert ended.code == 0, ended.said
    words = "trained 6 of 20 steps: the held-out loss has not fallen by more than 1000 below "
    assert ended.item["state"] == "Succeeded"
    assert ended.item["message"].startswith(words)
    assert list(home.losses("early")) == [1, 2, 3, 4, 5, 6]
    run = Home(path=home.path).run("default", "early")
    (condition,) = [
        each for each in json.loads(run.state_file.read_text())["status"]["conditions"] if each["type"] == "Succeeded"
    ]
    assert (condition["status"], condition["reason"]) == ("True", "StoppedEarly")
    assert words in (run.report / "report.html").read_text()
