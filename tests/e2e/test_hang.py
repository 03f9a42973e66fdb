"""A rank that stops for good ends nobody's patience: the run goes on, and loses no bit of any loss."""

from __future__ import annotations

import random

import pytest

from tests.e2e.polyreme_home import CHECKPOINT_EVERY, RANKS, PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

STALL_S = 5


def test_a_stopped_rank_is_found_by_two_signals_and_the_run_goes_on_with_the_same_losses(
    home: PolyremeHome, truth: dict[int, str], draw: random.Random
) -> None:
    hang = {"hang": {"action": "Restart", "stallSeconds": STALL_S}}
    rank, step = draw.choice(RANKS), draw.randrange(1, 2 * CHECKPOINT_EVERY)
    serving = home.start(home.write_job("hangs", health=hang), "--inject", f"stop-rank={rank}@{step}")
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["attempts"] == 2
    assert "no step after step" in ended.said
    assert f"rank {rank} on worker {rank // 2} is stopped (state T)" in ended.said
    assert home.losses("hangs") == truth
