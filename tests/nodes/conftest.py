"""Every test of this folder has a cluster whose nodes run pods in containers; all share one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.cluster import Cluster, cluster_for_tests

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
