"""etcd is restored from a backup while a job trains: the cluster forgets what happened since, the job does not."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster
from tests.nodes.release import DEVICES, created, is_true, job, kill_rank
from tests.nodes.servers import Outside
from tests.nodes.story import EVERY_STEPS, STEPS, records_of, write_job

NAME = "restored"


@pytest.mark.slow
@pytest.mark.usefixtures("production")
def test_a_gang_that_is_ahead_of_a_restored_cluster_trains_on_with_the_same_losses(
    cluster: Cluster,
    servers: Outside,
    losses: Mapping[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for node in cluster.get("nodes")["items"]:
        cluster.offer(node["metadata"]["name"], DEVICES)
    with created(cluster, job(cluster, write_job(NAME, tmp_path))) as training:
        training.until(lambda status: status.get("step", 0) > EVERY_STEPS and is_true(status, "Running"), "it trains")
        cluster.back_up()
        # The cluster will not know of this attempt, nor of the checkpoints that follow.
        kill_rank(cluster, training.pods[1], 2)
        ahead = training.until(
            lambda status: status["attempt"]["number"] == 2 and is_true(status, "Running"), "a second attempt"
        )["step"]
        training.until(lambda status: status["step"] > ahead + EVERY_STEPS, "it trains on")
        cluster.restore()
        status = training.until_succeeded()
    assert status["step"] == STEPS
    records = records_of(servers, NAME, monkeypatch)
    assert {each.step: each.loss.hex() for each in records.history} == losses
    assert len(records.history) == STEPS
    assert all(entry.committed for entry in records.checkpoints if entry.history)
