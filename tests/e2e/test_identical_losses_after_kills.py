"""Whatever is killed, and whenever, the run succeeds, and its losses are bit for bit those of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.e2e.polyreme_home import CHECKPOINT_EVERY, RANKS, STEPS, PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

IMPATIENT = {"backoff": {"initialSeconds": 1}}
"""Kills before the first checkpoint are restarts without progress, and those wait."""
PIPED = {"mode": "Explicit", "dp": 2, "ep": 2, "pp": 2, "schedule": "1F1B"}


def test_losses_after_kills_of_any_process_are_those_of_the_undisturbed_run(
    home: PolyremeHome, truth: dict[int, str], draw: random.Random
) -> None:
    serving = home.start(home.write_job("killed", failurePolicy=IMPATIENT))

    with serving.held(attempt=1, steps=draw.randrange(1, CHECKPOINT_EVERY - 2)):
        assert serving.committed(1) == [], "before the first checkpoint"
        serving.kill_rank(draw.choice(RANKS))

    torn = serving.until(lambda: serving.torn(2), "attempt 2 writes a checkpoint")
    serving.kill_rank(draw.choice(RANKS))

    serving.until(lambda: serving.attempts[-1] >= 3, "attempt 3 begins")
    strikes = [("fork_server", draw.choice((0, 1))), ("launcher", 1), ("launcher", 0)]
    for attempt, (who, where) in enumerate(strikes, start=3):
        serving.trained(attempt=attempt, steps=draw.randrange(1, CHECKPOINT_EVERY))
        os.kill(serving.pids(where)[who], signal.SIGKILL)

    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["attempts"] == 3 + len(strikes)
    assert ended.item["step"] == STEPS
    assert home.losses("killed") == truth
    resumed = [point.resume_from for point in home.records("killed").points]
    assert resumed[:2] == [None, None]
    assert torn[0].name not in resumed or (torn[0] / "COMMIT.json").exists()


@pytest.mark.soak
def test_a_pipeline_ends_well_over_a_killed_rank_and_data_engine_and_loses_no_bit_of_any_loss(
    home: PolyremeHome, draw: random.Random
) -> None:
    # Calm without data engines, hurt with them: these change no bit either.
    calm = home.start(home.write_job("calm", parallelism=PIPED)).end()
    assert calm.code == 0, calm.said
    serving = home.start(home.write_job("hurt", parallelism=PIPED, failurePolicy=IMPATIENT), POLYREME_DATA_ENGINE="on")
    serving.trained(attempt=1, steps=1)
    serving.kill_data_engine()
    serving.until(lambda: serving.committed(1), "attempt 1 committed a checkpoint")
    serving.trained(attempt=1, steps=draw.randrange(CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY))
    serving.kill_rank(draw.choice(RANKS))
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["attempts"] == 2
    assert ended.item["step"] == STEPS
    assert home.losses("hurt") == home.losses("calm")
