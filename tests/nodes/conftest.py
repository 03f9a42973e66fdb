"""Every test of this folder has a cluster whose nodes run pods in containers; all share one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster, cluster_for_tests
from tests.nodes.release import DEVICES, Release, prepare, production_values
from tests.nodes.servers import Outside, outside

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.nodes)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster under test."""
    with cluster_for_tests() as found:
        yield found


@pytest.fixture(scope="session")
def servers(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """PostgreSQL, Pulsar and S3."""
    with outside(cluster, tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="session")
def production(cluster: Cluster, servers: Outside) -> Iterator[Release]:
    """The release in the production profile, for all modules that come after the development profile's."""
    prepare(cluster)
    for node in cluster.get("nodes")["items"]:
        cluster.offer(node["metadata"]["name"], DEVICES)
    cluster.kubectl.apply(servers.secrets())
    release = Release(cluster)
    release.install(production_values(cluster, servers.values()))
    yield release
    release.uninstall()
