"""A run whose end is moved equals one that had that end from its first step on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.polyreme_home import PolyremeHome

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


def test_a_finished_run_is_extended_to_what_it_would_have_been(home: PolyremeHome) -> None:
    whole = home.call("run", str(home.write_job("whole", **spec(10, decaySteps=3))))
    assert whole.code == 0, whole.said
    ended = home.call("run", str(home.write_job("longer", **spec(6))))
    assert ended.code == 0, ended.said

    decaying = home.call("run", str(home.write_job("longer", **spec(10, decaySteps=6))))
    assert decaying.code == USAGE, decaying.said
    assert "the learning rate of step 6 would change from 0.001 to 0.000833333" in decaying.said

    done = home.call("run", str(home.write_job("longer", **spec(10, decaySteps=3))))
    assert done.code == 0, done.said
    assert "extends the run from step 6 to 10" in done.said
    assert "spec.training.optimizer.decaySteps: 0 -> 3" in done.said
    assert home.losses("longer") == home.losses("whole")
