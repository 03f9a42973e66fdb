"""The command of the page about checks of nodes: one of five nodes is slow, and the job trains on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme.run_files.records import read_records
from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

STEPS = 4


def test_a_worker_on_a_slow_node_is_moved_before_the_first_step(home: PolyremeHome) -> None:
    job = home.write_job(
        "checked",
        training={"steps": STEPS, "packsPerStep": 3, "seed": 1},
        parallelism={"mode": "Explicit", "dp": 3},
        workers={"replicas": 3, "devices": 1},
        preChecks={"enabled": True, "minPercentOfMedian": 10},
    )
    ended = home.start(job, "--nodes", "5", "--inject", "slow-node=1").end()
    assert ended.code == 0, ended.said
    assert "worker 1 failed a check of its node (PreCheckComputeSlow): compute: " in ended.said
    assert ended.item["attempts"] == 2
    assert [record.step for record in read_records(Path(ended.item["checkpoints"])).history] == [*range(1, STEPS + 1)]
