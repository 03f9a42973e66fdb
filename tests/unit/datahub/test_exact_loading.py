"""Every global batch is the walker's, whatever reads it; the longer form is ``make soak-loader-exact``."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.unit.datahub.exact_loading import plant, read, verdict, whole_lines

pytestmark = pytest.mark.slow
STEPS = 45


def test_every_batch_is_the_walkers_with_any_ranks_threads_and_kills(tmp_path: Path) -> None:
    rng = random.Random(1)
    planted = plant(tmp_path, samples=24, steps=STEPS, rng=rng)
    assert read(planted, tmp_path / "alone", ranks=1, threads=1, steps=STEPS, kill=None)
    for ranks in (8, 7):
        read(planted, tmp_path / "ranks", ranks=ranks, threads=2, steps=STEPS, kill=rng)
    assert read(planted, tmp_path / "ranks", ranks=3, threads=4, steps=STEPS, kill=None)
    found = verdict(planted, whole_lines(tmp_path / "alone"), whole_lines(tmp_path / "ranks"), STEPS)
    assert found["batches"] >= 2 * STEPS
    assert found["augmented_visits"] > 0
    assert [found[name] for name in ("mismatched", "lost", "repeated", "damaged")] == [0, 0, 0, 1]
    state = json.loads((tmp_path / "ranks" / "state.json").read_text())
    assert len(json.dumps(state, separators=(",", ":"))) <= 200
