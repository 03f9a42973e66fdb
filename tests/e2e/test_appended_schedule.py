"""Weights that are appended to a run's schedule: they take effect at a window's border, and alter no earlier step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hanging_rank import hanging
from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

REFUSED, USAGE = 4, 2
STEPS, BORDER = 12, 9
"""32 packs a step: windows of 8 steps."""
CHANGED, EVERY = 3, 2
"""The step after which the change is appended, which no checkpoint holds; steps between checkpoints."""
LONG_STEPS, LONGER_STEPS, LATER_BORDER = 24, 30, 17
"""Of a run that gets its change in its fourth step: the first window after the eight steps that may be known."""
KILLED = LONG_STEPS + 3
"""The step after which that run is killed."""


def stopping(*steps: int) -> dict[str, Any]:
    """Write a pod template in which rank 0 of attempt 1 stops after each of these steps.

    A signal from outside comes too late on a machine that trains the next steps meanwhile: then their checkpoint is
    committed, and the change comes too late for its step.
    """
    return hanging(",".join(f"1:0:{step + 1}:stop" for step in steps))


def spec(*schedule: tuple[int, str], steps: int = STEPS) -> dict[str, Any]:
    return {
        "data": {
            "sequenceTokens": 64,
            "seed": 17,
            "sources": [
                {"name": "one", "dataset": "sample/digits-1"},
                {"name": "two", "dataset": "sample/digits-2", "weight": 0},
            ],
            "schedule": [{"fromStep": step, "weights": [{"source": source, "weight": 1}]} for step, source in schedule],
        },
        "training": {"steps": steps, "packsPerStep": 32, "seed": 1},
        "parallelism": {"mode": "Auto"},
        "workers": {"replicas": 1, "devices": 1, "template": stopping(CHANGED)},
        "checkpoint": {"everySteps": EVERY, "keep": 3},
    }


def samples(home: PolyremeHome, step: int, job: str = "appended") -> set[str]:
    """Samples that a step trains on, as the run has it now."""
    shown = home.call("data", "preview", "--job", job, "--step", str(step), "--packs", "32", "-o", "json")
    assert shown.code == 0, shown.said
    packs = shown.item["packs"]
    return {document["sample"] for pack in packs for document in pack["documents"] if document["sample"]}


@pytest.mark.soak
def test_an_appended_change_takes_effect_at_the_next_window_of_the_next_attempt(home: PolyremeHome) -> None:
    first = home.start(home.write_job("appended", **spec()))
    with first.stopped(attempt=1, steps=CHANGED):
        first.kill_all()
    before = {record.step: record.loss for record in home.records("appended").steps[1]}
    trained = {step: samples(home, step) for step in (8, BORDER)}

    past = home.call("run", str(home.write_job("appended", **spec((2, "two")))))
    assert past.code == USAGE, past.said
    assert "fromStep 2 was appended, and the run has trained step 2 already; name a later step" in past.said
    unknown = home.call("run", str(home.write_job("appended", **spec((5, "three")))))
    assert unknown.code == USAGE
    assert "fromStep 5 weighs source 'three', sources are one, two" in unknown.said

    done = home.call("run", str(home.write_job("appended", **spec((5, "two")))), "-o", "json")
    assert done.code == 0, done.said
    assert "weights from step 5 on take effect at step 9, where the next window of the order begins" in done.said
    records = home.records("appended")
    assert records.mixture is not None
    assert [(change.from_step, change.step) for change in records.mixture.changes] == [(5, BORDER)]
    again = {record.step: record.loss for record in records.steps[2] if record.step in before}
    assert again
    assert again == {step: before[step] for step in again}, "steps that both attempts trained"
    after = {step: samples(home, step) for step in (8, BORDER)}
    assert after[8] == trained[8]
    assert after[BORDER] != trained[BORDER]

    edited = home.call("run", str(home.write_job("appended", **spec((6, "two")))))
    assert edited.code == REFUSED
    assert "spec.data.schedule[0].fromStep: 5 -> 6" in edited.said


@pytest.mark.parametrize("engine", ["on", pytest.param("off", marks=pytest.mark.soak)])
def test_a_change_that_is_appended_while_ranks_train_takes_effect_in_that_attempt(
    home: PolyremeHome, engine: str
) -> None:
    """Two ranks agree on it. What a later attempt trains again is the same, and no earlier step is another one."""
    name = f"live-{engine}"

    def written(*schedule: tuple[int, str], steps: int = LONG_STEPS) -> Path:
        workers = {"workers": {"replicas": 2, "devices": 1, "template": stopping(CHANGED, KILLED)}}
        return home.write_job(name, **spec(*schedule, steps=steps) | workers)

    running = home.start(written(), POLYREME_DATA_ENGINE=engine)
    with running.stopped(attempt=1, steps=CHANGED):
        assert bool(running.running("polyreme_datahub.loader.engine.server")) == (engine == "on")
        before = {step: samples(home, step, name) for step in (LATER_BORDER - 1, LATER_BORDER)}
        past = home.call("run", str(written((2, "two"))))
        assert past.code == USAGE, past.said
        assert "fromStep 2 was appended, and the run has trained step" in past.said
        done = home.call("run", str(written((5, "two"), steps=LONGER_STEPS)), "-o", "json")
        assert done.code == 0, done.said
        assert f"extends the run from step {LONG_STEPS} to {LONGER_STEPS}" in done.said
        assert done.item == [{"fromStep": 5, "weights": "two 1", "skipSteps": 0}]
        changes = running.pod_directory(0) / "changes.json"
        running.until(lambda: json.loads(changes.read_text())["schedule"], "the leader has it")
    with running.stopped(attempt=1, steps=KILLED):
        running.kill_all()
    first = {record.step: record.loss for record in home.records(name).steps[1]}
    ended = home.start(written((5, "two"), steps=LONGER_STEPS), POLYREME_DATA_ENGINE=engine).end()
    assert ended.code == 0, ended.said
    records = home.records(name)
    assert records.mixture is not None
    assert [(change.from_step, change.step) for change in records.mixture.changes] == [(5, LATER_BORDER)]
    again = {record.step: record.loss for record in records.steps[2] if record.step in first}
    assert max(again) > LONG_STEPS
    assert len(home.losses(name)) == LONGER_STEPS
    assert again == {step: first[step] for step in again}, "steps that both attempts trained"
    assert samples(home, LATER_BORDER - 1, name) == before[LATER_BORDER - 1]
    assert samples(home, LATER_BORDER, name).isdisjoint(before[LATER_BORDER])
