"""Jobs of a real cluster as the console's runs, by the contract suite that a home passes."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from tests.cluster.kube import api_client, named_kubeconfig, new_namespace
from tests.contract.run_sources import Reached, RunHarness, cluster_harness
from tests.contract.test_run_sources import *  # noqa: F403 - the suite itself


@contextlib.asynccontextmanager
async def open_cluster_of_runs(folder: Path) -> AsyncIterator[RunHarness]:
    """Open the cluster under test, with two namespaces of its own."""
    kubeconfig = named_kubeconfig()
    with api_client(kubeconfig) as api, new_namespace(api) as own, new_namespace(api) as other:
        connection = from_kubeconfig(kubeconfig)
        async with KubernetesCluster(connection) as cluster:
            yield cluster_harness(Reached(cluster=cluster, connection=connection), folder, own=own, other=other)


pytestmark = pytest.mark.parametrize("opener", [open_cluster_of_runs], ids=["kubernetes"])
