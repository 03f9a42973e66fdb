"""The sample of rewards, with a rank killed on its way: from a tenth of the answers in words to nearly all."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.exit_codes import ExitCode
from tests.e2e.polyreme_home import Ended, PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "manifests" / "samples" / "reward-words.yaml"
READ, STEPS, KILLED = 260, 340, 275
"""Steps before rewards, all steps, and the step at which a rank is killed, of the sample."""


@pytest.fixture
def rewarding(tmp_path: Path) -> PolyremeHome:
    """A home whose runs find the sample's reward."""
    path = os.pathsep.join([str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    return PolyremeHome(tmp_path, variables={"PYTHONPATH": path})


def test_a_kill_changes_no_answer_and_answers_are_shown(rewarding: PolyremeHome) -> None:
    spec: dict[str, Any] = copy.deepcopy(yaml.safe_load(SAMPLE.read_text())["spec"])
    del spec["evaluation"]
    read, reward = spec["training"]["stages"]
    read |= {"steps": 4, "warmupSteps": 1, "decaySteps": 0}
    reward |= {"steps": 8}
    spec["training"]["steps"] = 12
    spec["checkpoint"] = {"everySteps": 3, "keep": 2}
    done = rewarding.call("run", str(rewarding.write_job("few", **spec)), "--inject", "kill-rank=1@8")
    written = assert_no_answer_changed(rewarding, done, "few", read=4, killed=8)
    shown = rewarding.call("runs", "answers", "few", "--count", "500", "-o", "json").item
    assert {row["step"] for row in shown} == {12}
    assert all(row["reward"] == spelled_out(row["answer"], row["expected"]) for row in shown)
    absent = rewarding.call("runs", "answers", "few", "--step", "2")
    assert absent.code == ExitCode.NOT_FOUND
    assert f"has no answers of step 2: steps {min(written)} to 12 are kept" in absent.said


@pytest.mark.soak
def test_rewards_alone_teach_a_format(rewarding: PolyremeHome) -> None:
    done = rewarding.call("run", str(SAMPLE), "--inject", f"kill-rank=1@{KILLED}")
    assert_no_answer_changed(rewarding, done, "reward-words", read=READ, killed=KILLED)
    rewards = [record.objective["reward"] for record in rewarding.records("reward-words").history[READ:]]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.9
    (evaluation,) = (rewarding.path / "checkpoints/default/reward-words/evaluation").iterdir()
    pages = [page for page in json.loads(evaluation.read_text())["pages"] if page["set"] == "in-words"]
    assert sum(page["match"] for page in pages) / len(pages) > 0.9
    shown = rewarding.call("runs", "answers", "reward-words", "--count", "500", "-o", "json").item
    assert {row["step"] for row in shown} == {STEPS}
    assert {(row["reward"], row["answer"]) for row in shown if row["expected"] == "7"} >= {(1.0, "seven")}


def spelled_out(answer: str, expected: str) -> float:
    """What the sample's reward is to return."""
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return float(answer.strip() == words[int(expected)])


def assert_no_answer_changed(home: PolyremeHome, done: Ended, run: str, *, read: int, killed: int) -> dict[int, int]:
    """Assert that a run with a killed rank learned from what its first attempt drew, wherever that is kept.

    Returns:
        The attempt that drew the answers of each step that are kept.
    """
    assert done.code == 0, done.said
    history = home.records(run).history
    assert {record.spike_limit for record in history[read:]} == {None}, "their loss says nothing"
    assert max(record.objective["mismatch"] for record in history[read:]) < 1e-5
    written = {
        record["step"]: record["attempt"]
        for path in (home.path / "checkpoints/default" / run / "rollouts").iterdir()
        for record in [json.loads(path.read_text())]
    }
    again = [step for step in written if read < step < killed]
    assert again, "the second attempt begins before the kill"
    assert {written[step] for step in again} == {1}, "it learns from what the first one drew"
    assert "reward" in done.said
    return written
