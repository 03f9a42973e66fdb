"""The release and the job that the tests disturb on nodes, its losses without that, and what it left in the bucket."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from polyreme.run_files.records import RunRecords, read_records_at
from tests.e2e.polyreme_home import PolyremeHome
from tests.nodes.cluster import Cluster
from tests.nodes.release import DEVICES, JOBS, Release, production_values
from tests.nodes.servers import Outside
from tests.services.test_runs_on_servers import shortened
from tools.services.services import BUCKET

STEPS = 100
EVERY_STEPS = 4
NODE_LOST_S = 2
"""Beyond the time after which the cluster says that a node is not ready."""


@contextlib.contextmanager
def in_production(cluster: Cluster, servers: Outside) -> Iterator[Release]:
    """Install the release in the production profile until the block ends."""
    for node in cluster.get("nodes")["items"]:
        cluster.offer(node["metadata"]["name"], DEVICES)
    cluster.kubectl.apply(servers.secrets())
    release = Release(cluster)
    release.install(production_values(cluster, servers.values()))
    yield release
    release.uninstall()
    for node in cluster.get("nodes")["items"]:
        cluster.offer(node["metadata"]["name"], None)
    for secret in servers.secrets():
        cluster.kubectl("--namespace", secret["metadata"]["namespace"], "delete", "secret", secret["metadata"]["name"])


def write_job(name: str, folder: Path, **spec: Any) -> Path:
    """The quickstart's job with one source and fewer steps; all losses depend on their number."""
    checkpoint, health = {"everySteps": EVERY_STEPS}, {"nodeLostSeconds": NODE_LOST_S}
    return shortened(name, folder, training={"steps": STEPS}, checkpoint=checkpoint, health=health, **spec)


def losses_of_embedded(folder: Path) -> Mapping[int, str]:
    """Train the job in processes of this machine, and return its losses to the last bit."""
    home = PolyremeHome(folder)
    ended = home.start(write_job("undisturbed", folder)).end()
    assert ended.code == 0, ended.said
    return home.losses("undisturbed")


def records_of(servers: Outside, job: str, monkeypatch: pytest.MonkeyPatch) -> RunRecords:
    """What a job's ranks left in the bucket."""
    for name, value in servers.variables.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    assert os.environ["AWS_ENDPOINT_URL"] == servers.variables["AWS_ENDPOINT_URL"]
    return read_records_at(f"s3://{BUCKET}/checkpoints/{JOBS}/{job}")
