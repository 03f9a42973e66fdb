"""A job in pipeline stages: from YAML to its exported model, over a killed rank, with the losses of a calm run."""

from __future__ import annotations

import random

import pytest

from tests.e2e.polyreme_home import CHECKPOINT_EVERY, RANKS, STEPS, PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PIPED = {"mode": "Explicit", "dp": 2, "ep": 2, "pp": 2, "schedule": "1F1B"}
IMPATIENT = {"backoff": {"initialSeconds": 1}}


def test_a_pipeline_ends_well_over_a_killed_rank_and_loses_no_bit_of_any_loss(
    home: PolyremeHome, draw: random.Random
) -> None:
    calm = home.start(home.write_job("calm", parallelism=PIPED)).end()
    assert calm.code == 0, calm.said
    serving = home.start(home.write_job("hurt", parallelism=PIPED, failurePolicy=IMPATIENT))
    serving.until(lambda: serving.committed(1), "attempt 1 committed a checkpoint")
    serving.trained(attempt=1, steps=draw.randrange(CHECKPOINT_EVERY + 1, 2 * CHECKPOINT_EVERY))
    serving.kill_rank(draw.choice(RANKS))
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["attempts"] == 2
    assert ended.item["step"] == STEPS
    assert home.losses("hurt") == home.losses("calm")
