"""Every test of this folder has a cluster whose nodes run pods in containers; all share one."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster, cluster_for_tests
from tests.nodes.release import Release, prepare
from tests.nodes.servers import Outside, outside
from tests.nodes.story import in_production, losses_of_embedded

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
def prepared(cluster: Cluster) -> Cluster:
    """The cluster, with our images and what pods mount."""
    prepare(cluster)
    return cluster


@pytest.fixture(scope="session")
def production(prepared: Cluster, servers: Outside) -> Iterator[Release]:
    """The release in the production profile, for all modules that come after the development profile's."""
    with in_production(prepared, servers) as release:
        yield release


@pytest.fixture(scope="session")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, str]:
    """The losses of an embedded run of the job, to the last bit."""
    return losses_of_embedded(tmp_path_factory.mktemp("embedded"))
