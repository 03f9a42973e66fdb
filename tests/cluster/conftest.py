"""Every test of this folder has a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import cluster_for_tests
from tests.cluster.operators import install, replica

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
    folder = tmp_path_factory.mktemp("operator")
    log = folder / "operator.log"
    with replica(install(kubeconfig, folder), log, "--binding", "NodeAffinity"):
        yield kubeconfig
    said = log.read_text()
    assert '"level": "error"' not in said, said[-4000:]
    refused = [line for line in said.splitlines() if " 403 " in line and "being terminated" not in line]
    assert not refused, refused[:3]
