"""The node agent on real nodes: a fault in the kernel log moves the work, and costs no loss."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from polyreme_operator.health.record import HEALTH
from tests.nodes.agents import agents, condition, lose_gpu, record_of, repair, taints
from tests.nodes.cluster import ROOT, Cluster
from tests.nodes.release import DEVICES, Release, created, is_true, job
from tests.nodes.servers import Outside
from tests.nodes.story import records_of, write_job
from tests.services.test_runs_on_servers import shortened

NAME = "faulty"
PROBATION = "in probation after a fault, and only jobs with acceptProbation use them"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts(cluster: Cluster, production: Release, servers: Outside) -> Iterator[Path]:
    """The host trees that the agents read."""
    with agents(cluster, production, servers) as found:
        yield found


def plugin(cluster: Cluster, *words: str) -> str:
    """Run kubectl's plugin."""
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "polyreme.plugin", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_lost_gpu_moves_the_work_and_the_node_returns_through_repair_and_probation(
    cluster: Cluster,
    hosts: Path,
    servers: Outside,
    losses: Mapping[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with created(cluster, job(cluster, write_job(NAME, tmp_path))) as training:
        faulty = lose_gpu(cluster, hosts, training)
        status = training.until_succeeded()
    assert not status.get("restartRecords"), "a move is no failure"
    history = records_of(servers, NAME, monkeypatch).history
    assert {each.step: each.loss.hex() for each in history} == losses
    fault = condition(cluster, faulty, "polyreme.dev/GPU")
    assert fault is not None
    assert (fault["status"], fault["reason"]) == ("True", "Xid79")
    assert faulty in plugin(cluster, "nodes")
    repair(cluster, hosts, faulty)
    assert HEALTH not in taints(cluster, faulty)
    for name in (each["metadata"]["name"] for each in cluster.get("nodes")["items"]):
        cluster.offer(name, DEVICES)
    loads = job(cluster, shortened("loads", tmp_path))
    with created(cluster, loads) as refused:
        refused.until(lambda status: PROBATION in json.dumps(status.get("conditions")), "it is told of the probation")
        assert not is_true(refused.status, "Admitted")
    loads["spec"]["acceptProbation"] = True
    with created(cluster, loads) as accepted:
        accepted.until_succeeded()
    # What it showed is remembered as a risk for some hours, in full service.
    cluster.until(lambda: record_of(cluster, faulty).get("state") != "probation", "the end of its probation")
    assert record_of(cluster, faulty).get("state", "healthy") in {"healthy", "at-risk"}
    assert HEALTH not in taints(cluster, faulty)
