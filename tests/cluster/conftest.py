"""Every test of this folder has a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import cluster_for_tests

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session", autouse=True)
def kubeconfig() -> Iterator[str]:
    """Path of the kubeconfig of the cluster under test."""
    with cluster_for_tests() as path:
        yield path
