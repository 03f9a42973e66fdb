"""``polyreme runs answers``: what a run has drawn, wherever its checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme_api.exit_codes import ExitCode
from polyreme_api.rewards import Rewarded
from polyreme_datahub.objects import open_store
from polyreme_trainer.train.rollouts.record import Answer, RolloutLog
from tests.kept.folders import FINISHED, VERSIONS, copy_home

TEXTS = Rewarded(prompt="which\ndigit", answer="7 " * 50, expected="7", reward=0.5)
DRAWN = Answer(tokens=(3, 1), log_probs=(-1.0, -2.0), ended=True, rewarded=TEXTS)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return copy_home(VERSIONS[0], tmp_path)


def commit(root: Path) -> None:
    log = RolloutLog(open_store(root.as_uri()), attempt=2)
    for step in (8, 9):
        log.commit(f"rollouts/step-{step:09d}-abc.json", step, {"key": [DRAWN, DRAWN]})


@pytest.mark.parametrize("elsewhere", [False, True])
def test_answers_are_read_from_the_checkpoints_of_the_run(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], elsewhere: bool
) -> None:
    run = Home(path=home).run("default", FINISHED)
    if elsewhere:
        job = yaml.safe_load(run.job_file.read_text())
        job["spec"]["checkpoint"] = {**job["spec"]["checkpoint"], "location": (tmp_path / "elsewhere").as_uri()}
        run.job_file.write_text(json.dumps(job))
    commit(tmp_path / "elsewhere" if elsewhere else run.checkpoints)
    asked = ["--home", str(home), "runs", "answers", FINISHED]
    assert invoke([*asked, "--count", "1", "-o", "json"]) == ExitCode.OK
    (row,) = json.loads(capsys.readouterr().out)["items"]
    assert (row["step"], row["reward"], row["answer"], row["tokens"]) == (9, 0.5, TEXTS.answer, 2)
    assert invoke([*asked, "--step", "8"]) == ExitCode.OK
    table = capsys.readouterr().out
    assert table.count("which digit") == 2
    assert "…" in table
    assert invoke([*asked, "--step", "3"]) == ExitCode.NOT_FOUND
    assert "has no answers of step 3: steps 8 to 9 are kept" in capsys.readouterr().err


def test_a_run_without_answers_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--home", str(home), "runs", "answers", FINISHED]) == ExitCode.NOT_FOUND
    assert f"run '{FINISHED}' has no answers: no step of it has drawn any" in capsys.readouterr().err
