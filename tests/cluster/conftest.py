"""Every test of this folder has a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import cluster_for_tests
from tests.cluster.operators import operating

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


@pytest.fixture(scope="module")
def operated(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the kubeconfig of a cluster on which the operator runs, with kube-scheduler binding its pods."""
    with operating(kubeconfig, tmp_path_factory.mktemp("operator"), "--binding", "NodeAffinity"):
        yield kubeconfig
