"""The sample of rewards, with a rank killed on its way: from a tenth of the answers in words to nearly all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from polyreme_api.exit_codes import ExitCode
from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "manifests" / "samples" / "reward-words.yaml"
READ, STEPS, KILLED = 260, 340, 275


def test_rewards_alone_teach_a_format_and_a_kill_changes_no_answer(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    home = PolyremeHome(tmp_path, variables={"PYTHONPATH": path})
    done = home.call("run", str(SAMPLE), "--inject", f"kill-rank=1@{KILLED}")
    assert done.code == 0, done.said
    history = home.records("reward-words").history
    rewards = [record.objective["reward"] for record in history[READ:]]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    assert {record.spike_limit for record in history[READ:]} == {None}, "their loss says nothing"
    assert max(record.objective["mismatch"] for record in history[READ:]) < 1e-5
    checkpoints = home.path / "checkpoints/default/reward-words"
    written = {
        record["step"]: record["attempt"]
        for path in (checkpoints / "rollouts").iterdir()
        for record in [json.loads(path.read_text())]
    }
    again = [step for step in written if READ < step < KILLED]
    assert again, "the second attempt begins before the kill"
    assert {written[step] for step in again} == {1}, "it learns from what the first one drew"
    (evaluation,) = (checkpoints / "evaluation").iterdir()
    pages = [page for page in json.loads(evaluation.read_text())["pages"] if page["set"] == "in-words"]
    assert sum(page["match"] for page in pages) / len(pages) > 0.9
    assert "reward" in done.said
    shown = home.call("runs", "answers", "reward-words", "--count", "500", "-o", "json").item
    assert {row["step"] for row in shown} == {STEPS}
    assert {(row["reward"], row["answer"]) for row in shown if row["expected"] == "7"} >= {(1.0, "seven")}
    absent = home.call("runs", "answers", "reward-words", "--step", "9")
    assert absent.code == ExitCode.NOT_FOUND
    assert f"has no answers of step 9: steps {min(written)} to {STEPS} are kept" in absent.said
