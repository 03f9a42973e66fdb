"""A sweep of two small jobs: interrupted, continued by the same command, and not repeated once it is done."""

from __future__ import annotations

import signal

import pytest

from polyreme.run_files.paths import Home
from polyreme_api.exit_codes import ExitCode
from tests.e2e.polyreme_home import PolyremeHome, Serving

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

STEPS = 60
SET = ("--set", "training.optimizer.learningRate=1e-3,3e-4", "--set", f"training.steps={STEPS}", "--at-once", "1")
FIRST, SECOND = "swept-learningrate-1e-3", "swept-learningrate-3e-4"


def test_an_interrupted_sweep_continues_with_the_same_command(home: PolyremeHome) -> None:
    job = home.write_job(
        "swept",
        training={"steps": 1, "packsPerStep": 1, "seed": 1},
        parallelism={"mode": "Auto"},
        workers={"replicas": 1, "devices": 1},
    )
    known = Home(path=home.path)
    sweeping = home.start(job, *SET, command="sweep")
    first_run = Serving(sweeping.process, known.run("default", FIRST), job.with_suffix(".out"))
    # Held still, or a fast machine trains the last steps before the request has reached the rank.
    with first_run.held(attempt=1, steps=3, of=STEPS):
        sweeping.process.send_signal(signal.SIGINT)
        first_run.until(first_run.is_asked_to_end, "the rank of the first job is asked to end")
    stopped = sweeping.end()
    assert stopped.code == ExitCode.CANCELLED, stopped.said
    (row,) = stopped.item["runs"]
    assert (row["name"], row["state"]) == (FIRST, "Stopped")
    assert 3 <= row["step"] < STEPS
    assert not known.run("default", SECOND).exists

    ended = home.call("sweep", str(job), *SET, "-o", "json")
    assert ended.code == ExitCode.OK, ended.said
    first, second = ended.item["runs"]
    assert [(each["name"], each["state"], each["step"]) for each in (first, second)] == [
        (FIRST, "Succeeded", STEPS),
        (SECOND, "Succeeded", STEPS),
    ]
    assert (first["attempts"], second["attempts"]) == (2, 1)
    assert ended.item["differences"] == [{"field": "spec.training.optimizer.learningRate", "values": ["1e-3", "3e-4"]}]

    again = home.call("sweep", str(job), *SET, "-o", "json")
    assert again.code == ExitCode.OK
    assert "2 have succeeded before" in again.said
    assert "starts" not in again.said
