"""The end of a run: moved, it equals one that was there from the first step on; by epochs, it follows from the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hanging_rank import hanging
from tests.e2e.polyreme_home import PolyremeHome
from tests.e2e.small_jobs import record, small, write_jsonl, write_records

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

USAGE = 2


def spec(steps: int, **optimizer: Any) -> dict[str, Any]:
    return {
        "data": {"sequenceTokens": 64, "seed": 17, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
        "training": {"steps": steps, "packsPerStep": 2, "seed": 1, "optimizer": optimizer},
        "parallelism": {"mode": "Auto"},
        "workers": {"replicas": 1, "devices": 1},
        "checkpoint": {"everySteps": 2, "keep": 3},
    }


@pytest.fixture(scope="module")
def whole(home: PolyremeHome) -> dict[str, Any]:
    """The spec of a run of ten steps, which has ended."""
    whole = spec(10, decaySteps=3)
    done = home.call("run", str(home.write_job("whole", **whole)))
    assert done.code == 0, done.said
    return whole


def test_a_finished_run_is_extended_to_what_it_would_have_been(home: PolyremeHome, whole: dict[str, Any]) -> None:
    ended = home.call("run", str(home.write_job("longer", **spec(6))))
    assert ended.code == 0, ended.said

    decaying = home.call("run", str(home.write_job("longer", **spec(10, decaySteps=6))))
    assert decaying.code == USAGE, decaying.said
    assert "the learning rate of step 6 would change from 0.001 to 0.000833333" in decaying.said

    done = home.call("run", str(home.write_job("longer", **whole)), "-o", "json")
    assert done.code == 0, done.said
    assert "extends the run from step 6 to 10" in done.said
    assert "spec.training.optimizer.decaySteps: 0 -> 3" in done.said
    assert home.losses("longer") == home.losses("whole")
    report = Path(done.item["report"]).read_text()
    assert "attempt 2 extends the run from step 6 to 10: spec.training.optimizer.decaySteps: 0 -&gt; 3" in report


def test_a_run_of_epochs_ends_when_every_sample_was_visited_so_often(home: PolyremeHome, tmp_path: Path) -> None:
    write_records(tmp_path / "pictures")
    records = [record(f"r{at}", [f"pictures/{at:02d}.png"], "green") for at in range(1, 60, 2)]
    write_jsonl(tmp_path / "few.jsonl", list(records))
    assert home.call("data", "register", "few", str(tmp_path / "few.jsonl")).code == 0
    spec = small("few") | {"training": {"epochs": 4, "packsPerStep": 1, "seed": 1}}
    job = home.write_job("epochs", **spec)
    assert "4 epochs, 1 x 96 tokens" in home.call("validate", str(job)).output
    running = home.start(job)
    with running.held(attempt=1, steps=3):
        running.kill_all()
    done = home.call("run", str(job), "-o", "json")
    assert done.code == 0, done.said
    steps = done.item["steps"]
    assert done.item["step"] == steps == len(home.losses("epochs"))
    assert f"4 epochs = {steps} steps" in done.said
    assert f"4 epochs = {steps} steps, 1 x 96 tokens" in home.call("validate", str(job)).output
    (row,) = home.call("data", "mixture", "--job", "epochs", "-o", "json").item
    assert (row["toStep"], row["visitsMin"]) == (steps, 4)
    trained = home.losses("epochs")
    fewer = home.call("run", str(home.write_job("epochs", **(spec | {"training": {**spec["training"], "epochs": 2}}))))
    assert fewer.code == USAGE, fewer.said
    assert f"is below step {steps}, which the run has trained" in fewer.said
    longer = home.write_job("epochs", **(spec | {"training": {**spec["training"], "epochs": 5}}))
    done = home.call("run", str(longer), "-o", "json")
    assert done.code == 0, done.said
    assert "extends the run from 4 to 5 epochs: spec.training.epochs: 4 -> 5" in done.said
    assert f"5 epochs = {done.item['steps']} steps" in done.said
    assert done.item["step"] == done.item["steps"] == len(home.losses("epochs")) > steps
    assert trained.items() < home.losses("epochs").items(), "no step was trained again"
    (row,) = home.call("data", "mixture", "--job", "epochs", "-o", "json").item
    assert row["visitsMin"] == 5


def test_a_run_that_starts_from_a_checkpoint_continues_as_its_run_would_have(
    home: PolyremeHome, whole: dict[str, Any]
) -> None:
    root = f"file://{home.path}/checkpoints/default/whole"
    (kept,) = (row["name"] for row in home.call("checkpoint", "ls", "whole", "-o", "json").item if row["step"] == 6)

    def starting(name: str, **parts: Any) -> Path:
        return home.write_job(name, **{**whole, "startFrom": {"checkpoint": f"{root}/{kept}"}, **parts})

    # Of four steps, a fast machine trains the others before a signal comes.
    second = starting("second", workers={**whole["workers"], "template": hanging("1:0:8:stop")})
    killed = home.start(second)
    with killed.stopped(attempt=1, steps=1):
        killed.kill_all()
    done = home.call("run", str(second), "-o", "json")
    assert done.code == 0, done.said
    assert "weights, the optimizer's state and the place in the data are taken over, so the next step is 7" in done.said
    first = {record.step: record.loss for record in home.records("whole").history}
    assert {record.step: record.loss for record in home.records("second").history} == {
        step: first[step] for step in range(7, 11)
    }

    short = {**whole["training"], "steps": 3}
    other = home.call("run", str(starting("other", data={**whole["data"], "seed": 18}, training=short)))
    assert other.code == 0, other.said
    assert "the place in the data is not, since" in other.said
    assert [record.step for record in home.records("other").history] == [1, 2, 3]
    gone = home.write_job("gone", **{**whole, "startFrom": {"checkpoint": f"{root}/a000009-s00000006"}})
    refused = home.call("run", str(gone))
    assert refused.code == USAGE, refused.said
    assert "no checkpoint a000009-s00000006 in file://" in refused.said
