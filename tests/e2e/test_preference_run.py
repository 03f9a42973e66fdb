"""The sample of preferences, shorter: a model that answers in digits learns to answer in words, and reads as well."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "prefer-words.yaml"
READ, PREFER, PAGES = 160, 60, 60
SCORER = Path(__file__).parents[2] / "examples" / "score_pairs.py"


def spec(*, stages: int) -> dict[str, Any]:
    given: dict[str, Any] = copy.deepcopy(yaml.safe_load(SAMPLE.read_text())["spec"])
    kept = given["training"]["stages"] = given["training"]["stages"][:stages]
    for stage, steps in zip(kept, (READ, PREFER), strict=False):
        stage["steps"] = steps
    given["training"]["steps"] = sum(stage["steps"] for stage in kept)
    given["evaluation"]["samplesMax"] = 2 * PAGES
    return given


def right(home: PolyremeHome, run: str, name: str) -> float:
    """Share of a held-out set's pages that are answered as expected."""
    (file,) = (home.path / "checkpoints/default" / run / "evaluation").iterdir()
    pages = [page for page in json.loads(file.read_text())["pages"] if page["set"] == name]
    return sum(bool(page["match"]) for page in pages) / len(pages)


@pytest.mark.soak
def test_answers_in_words_are_preferred_and_as_right_as_before(home: PolyremeHome) -> None:
    before = home.call("run", str(home.write_job("before", **spec(stages=1))))
    assert before.code == 0, before.said
    digits = right(home, "before", "in-digits")
    assert right(home, "before", "in-words") < 0.2
    assert digits > 0.8

    done = home.call("run", str(home.write_job("after", **spec(stages=2))))
    assert done.code == 0, done.said
    assert right(home, "after", "in-words") > 0.9 * digits
    records = home.records("after").history
    first, last = records[READ], records[-1]
    assert first.loss == pytest.approx(0.693147, abs=1e-6)
    assert first.objective["rewardMargin"] == 0.0
    assert last.objective["pairAccuracy"] == 1.0
    # All of them on one machine, all but one on another: a last bit can decide a held-out pair.
    assert last.held_out_pairs["in-words"] >= 1 - 2 / PAGES
    assert "reward margin" in done.said
    report = (home.path / "runs/default/after/report/report.html").read_text()
    assert "<td>held-out pair accuracy</td>" in report


def test_a_job_waits_for_scores_that_another_program_writes(home: PolyremeHome) -> None:
    """Two gangs share the work: each scores its share of the packs."""
    given = spec(stages=2)
    given["training"] |= {"steps": 6, "stages": [{"name": "prefer", "steps": 6}]}
    given["training"]["stages"][0]["objective"] = {"kind": "Preference", "reference": {"name": "unigram"}}
    given["data"]["sources"] = [{"name": "preferred", "dataset": "sample/digits-1-preferred"}]
    job = home.write_job("scored", **{name: part for name, part in given.items() if name != "evaluation"})
    running = home.start(job)
    state = running.run.state_file
    running.until(lambda: state.exists() and "0 made by this run" in state.read_text(), "it waits for scores")
    uid = home.call("runs", "show", "scored", "-o", "json").item["uid"]
    for rank in (0, 1):
        scorer = [sys.executable, str(SCORER), f"file://{home.path}/data/objects", str(job), uid, "unigram"]
        subprocess.run([*scorer, str(rank), "2"], check=True, timeout=120)
    done = running.end()
    assert done.code == 0, done.said
    first = home.records("scored").history[0]
    assert first.objective["referenceDrift"] > 0.0
    assert len(home.losses("scored")) == 6
    assert "<td>reward margin</td>" in (home.path / "runs/default/scored/report/report.html").read_text()
