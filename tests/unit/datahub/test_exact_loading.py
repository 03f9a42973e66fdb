"""Every global batch is the walker's, whatever reads it; the longer form is ``make soak-loader-exact``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.datahub.exact_loading import EPOCHS_MAX, plant, read, state_bytes, verdict, whole_lines

pytestmark = pytest.mark.slow
STEPS, SAMPLES = 52, 24


def test_every_batch_is_the_walkers_with_any_ranks_threads_and_kills(tmp_path: Path) -> None:
    rng = random.Random(1)
    planted = plant(tmp_path, samples=SAMPLES, steps=STEPS, rng=rng)
    assert read(planted, tmp_path / "alone", ranks=1, threads=1, steps=STEPS, kill=None)
    assert planted.border < STEPS
    for ranks, appended in ((8, False), (7, True)):
        read(planted, tmp_path / "ranks", ranks=ranks, threads=2, steps=STEPS, kill=rng, appended=appended)
    assert read(planted, tmp_path / "ranks", ranks=3, threads=4, steps=STEPS, kill=None)
    found = verdict(planted, whole_lines(tmp_path / "alone"), whole_lines(tmp_path / "ranks"), STEPS)
    assert found["batches"] >= 2 * STEPS
    assert found["augmented_visits"] > 0
    assert [found[name] for name in ("mismatched", "lost", "repeated", "damaged")] == [0, 0, 0, 1]
    assert found["limited_visits"] == EPOCHS_MAX * SAMPLES, (
        "its last epoch ends before the change that passes over some"
    )
    assert state_bytes(tmp_path / "ranks") <= 256
