"""A spike by corrupted samples: the run goes back, skips their data, and is the run that was given that entry."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from polyreme.run_files.paths import Home
from polyreme_api.checkpoint_inventory import survey
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import attempt_key
from polyreme_datahub.objects import open_store
from polyreme_planner.rollback import IN_A_ROW_MAX
from tests.e2e.polyreme_home import PolyremeHome
from tests.e2e.small_jobs import record, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

RECORDS, CORRUPTED = 2400, 550
STEPS, WINDOW_STEPS, WINDOW_OF_ORDER = 36, 8, 16
"""16 packs a step: windows of the order have 16 steps."""
COLOURS = ("red", "green", "blue", "yellow")


def write_corrupted(path: Path) -> None:
    """Write questions that contain their answer; the answer to one of them is noise."""
    draw, records = random.Random(5), []
    for at in range(RECORDS):
        colour = COLOURS[at % len(COLOURS)]
        asked = record(f"s-{at:04d}", [], colour)
        words = " ".join("".join(draw.choices("abcdefghijklmnop", k=3)) for _ in range(9))
        asked["conversations"][0]["content"] = f"{words} say {colour}."
        if at == CORRUPTED:
            asked["conversations"][1]["content"] = "".join(draw.choices("qzxjkvwQZXJKVW#%&@", k=80))
        records.append(asked)
    write_jsonl(path, list(records))


def spec(action: str, *schedule: dict[str, Any]) -> dict[str, Any]:
    return {
        "data": {
            "sequenceTokens": 128,
            "seed": 3,
            "sources": [{"name": "own", "dataset": "own"}],
            "schedule": list(schedule),
        },
        "training": {"steps": STEPS, "packsPerStep": 16, "seed": 1, "optimizer": {"learningRate": "0.004"}},
        "parallelism": {"mode": "Auto"},
        "workers": {"replicas": 1, "devices": 2},
        "checkpoint": {"everySteps": 4, "keep": 2},
        "health": {"loss": {"action": action, "windowSteps": WINDOW_STEPS, "deviations": 200}},
    }


def test_a_run_that_rolls_back_equals_an_undisturbed_one_with_the_same_entry(
    home: PolyremeHome, tmp_path: Path
) -> None:
    write_corrupted(tmp_path / "own.jsonl")
    assert home.call("data", "register", "own", str(tmp_path / "own.jsonl")).code == 0
    rolled = home.start(home.write_job("rolled", **spec("Rollback"))).end()
    assert rolled.code == 0, rolled.said
    assert rolled.item["attempts"] == 2
    seen = survey(open_store(Home(path=home.path).run("default", "rolled").checkpoints.as_uri()))
    (rejection,) = seen.rejections
    assert rejection.attempt == 1
    assert rejection.from_step == 1 + WINDOW_OF_ORDER
    assert rejection.skip_steps == WINDOW_OF_ORDER
    assert rejection.from_step <= rejection.spike_step < rejection.from_step + WINDOW_OF_ORDER
    resumed = seen.points[-1].step
    assert resumed == rejection.after_step == min(rejection.from_step, rejection.spike_step - WINDOW_STEPS) - 1
    assert f"spike in step {rejection.spike_step}: loss" in rolled.said
    page = Path(rolled.item["report"]).read_text()
    assert f"What step {rejection.spike_step} of attempt 1 trained on (16 of 16 packs)" in page
    assert f"s-{CORRUPTED:04d}" in page, "as attempt 1 read it: attempt 2 passes it over"

    entry = {"fromStep": rejection.from_step, "skipSteps": rejection.skip_steps}
    given = spec("Notify", entry | {"weights": [{"source": "own", "weight": 1}]})
    plain = home.start(home.write_job("plain", **given)).end()
    assert plain.code == 0, plain.said
    assert plain.item["attempts"] == 1
    assert home.losses("rolled") == home.losses("plain")


@pytest.mark.soak
def test_a_run_that_rolled_back_three_times_is_paused_at_a_spike_and_continues_when_asked(
    home: PolyremeHome, tmp_path: Path
) -> None:
    write_corrupted(tmp_path / "own.jsonl")
    assert home.call("data", "register", "own", str(tmp_path / "own.jsonl")).code == 0
    job = home.write_job("paused", **spec("Rollback"))
    first = home.start(job)
    with first.held(attempt=1, steps=3):
        first.kill_all()
    # As after three rollbacks for spikes in step 24, whose entries skip nothing in this run.
    point = first.run.checkpoints / attempt_key(1)
    known = json.loads(point.read_text())
    beyond = {"fromStep": STEPS + 1, "skipSteps": 1}
    spike = {"attempt": 1, "spikeStep": 24, "afterStep": 0, **beyond}
    entry = {**beyond, "step": STEPS + 1, "weights": [{"source": "own", "weight": 1}], "rejection": spike}
    known["mixture"]["changes"] = [entry] * IN_A_ROW_MAX
    point.write_text(json.dumps(known))
    for attempt in (2, 3):
        paused = home.start(job).end()
        assert paused.code == ExitCode.RUN_FAILED, paused.said
        assert (paused.item["attempts"], paused.item["state"]) == (attempt, "Stopped")
        assert "after 3 rollbacks in a row, the most that are allowed; paused until" in paused.item["message"]
        assert not survey(open_store(first.run.checkpoints.as_uri())).rejections
