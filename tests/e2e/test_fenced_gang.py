"""A gang whose place was given away stops at its leader's next look at the checkpoint root, not at its next save."""

from __future__ import annotations

import signal

import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import claim_key
from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

STEPS = 4000
"""A minute of training, in which nothing is saved."""


def test_a_newer_claim_ends_the_gang_long_before_its_next_checkpoint(home: PolyremeHome) -> None:
    job = home.write_job(
        "fenced",
        workers={"replicas": 1, "devices": 1},
        parallelism={"mode": "Auto"},
        training={"steps": STEPS, "packsPerStep": 1, "seed": 1},
        checkpoint={"everySteps": STEPS},
    )
    serving = home.start(job)
    serving.trained(attempt=1, steps=5)
    log = serving.pod_directory(0) / "pod.log"
    (serving.run.checkpoints / claim_key(2)).touch()
    serving.until(lambda: serving.attempts == [1, 2], "another gang has begun")
    assert "training ends: attempt is fenced: 1, a newer one has started" in log.read_text()
    assert serving.step(1) < STEPS // 2
    serving.process.send_signal(signal.SIGINT)
    assert serving.end().code == ExitCode.CANCELLED
