"""The chart's development profile: one command, and the quickstart's job trains in pods on data that pods made."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_api.labels import INSTALLATION_KEY_NAME, RESOURCE_DEVICE
from tests.nodes import packages
from tests.nodes.cluster import PATIENCE_S, Cluster
from tests.nodes.release import JOBS, SYSTEM, Release, created, job, values
from tests.services.test_runs_on_servers import STEPS, shortened

KEPT_S = 10
ROLLOUTS = 4


@pytest.fixture(scope="module")
def release(prepared: Cluster) -> Release:
    """The release, which the tests of this module move on from state to state."""
    return Release(prepared)


@contextlib.contextmanager
def followed(cluster: Cluster, name: str) -> Iterator[subprocess.Popen[str]]:
    """Follow the logs of a job while a block runs, from before its pods are there."""
    command = [sys.executable, "-m", "polyreme.plugin", "logs", name, "-f", "--kubeconfig", str(cluster.kubeconfig)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "-n", JOBS], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _offered(cluster: Cluster) -> list[str | None]:
    return [node["status"]["allocatable"].get(RESOURCE_DEVICE) for node in cluster.get("nodes")["items"]]


@pytest.mark.slow
def test_the_quickstarts_job_succeeds_in_pods_on_data_that_pods_made(
    cluster: Cluster, release: Release, tmp_path: Path
) -> None:
    release.install(values(cluster, jobs={"namespaces": [JOBS]}, devices={"perNode": 2}))
    cluster.until(lambda: set(_offered(cluster)) == {"2"}, "every node offers two devices")
    manifest = job(cluster, shortened("first", tmp_path))
    manifest["spec"]["ttlSecondsAfterFinished"] = KEPT_S
    with created(cluster, manifest) as first, followed(cluster, "first") as following:
        status = first.until_succeeded()
        pods = first.pods
        words = ("--namespace", JOBS, "get", "trainingjobs", "--output=name")
        cluster.until(lambda: not cluster.kubectl(*words).strip(), "the job is deleted after its time")
        lines, said = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 0, said
    workers = manifest["spec"]["workers"]
    for rank in range(workers["replicas"] * workers["devices"]):
        assert any(line.startswith(f"[rank {rank} attempt 1] ") for line in lines.splitlines()), said
    assert status["attempt"]["number"] == 1
    assert status["step"] == STEPS
    assert {pod["spec"]["nodeName"] for pod in pods} == {
        node["metadata"]["name"] for node in cluster.get("nodes")["items"]
    }
    for pod in pods:
        sources = [set(volume) - {"name"} for volume in pod["spec"]["volumes"] if volume["name"] != packages.CLAIM]
        assert not any({"hostPath", "persistentVolumeClaim", "nfs"} & source for source in sources)


def _operator_nodes(cluster: Cluster) -> list[str]:
    """Node of each replica of the operator that is not about to end."""
    words = ("--namespace", SYSTEM, "pods", "-l", "app.kubernetes.io/name=polyreme-operator")
    pods = [pod for pod in cluster.get(*words)["items"] if "deletionTimestamp" not in pod["metadata"]]
    return sorted(pod["spec"]["nodeName"] for pod in pods)


@pytest.mark.slow
def test_the_operators_replicas_are_on_two_nodes_after_each_rollout_and_on_one_if_there_is_no_other(
    cluster: Cluster, release: Release
) -> None:
    """The nodes have no zone label, as on kind."""
    one, other = (node["metadata"]["name"] for node in cluster.get("nodes")["items"])
    assert _operator_nodes(cluster) == [one, other]
    for _ in range(ROLLOUTS):
        cluster.kubectl("--namespace", SYSTEM, "rollout", "restart", "deployment/polyreme-operator")
        release.wait()
        assert _operator_nodes(cluster) == [one, other]
    cluster.kubectl("cordon", other)
    try:
        cluster.kubectl("--namespace", SYSTEM, "rollout", "restart", "deployment/polyreme-operator")
        release.wait()
        assert _operator_nodes(cluster) == [one, one]
    finally:
        cluster.kubectl("uncordon", other)


@pytest.mark.slow
def test_an_uninstall_leaves_the_jobs_their_kinds_and_the_volume(cluster: Cluster, release: Release) -> None:
    release.uninstall()
    kept = {"configmap/kube-root-ca.crt", "serviceaccount/default", "configmap/polyreme-intents"}
    kept.add(f"secret/{INSTALLATION_KEY_NAME}")

    def left() -> set[str]:
        kinds = "all,secrets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets"
        return set(cluster.kubectl("--namespace", SYSTEM, "get", kinds, "-o", "name").split())

    cluster.until(lambda: left() <= kept, "all but what the controllers made is gone")
    assert {crd["metadata"]["name"] for crd in cluster.get("crds")["items"]} >= {"trainingjobs.polyreme.dev"}
    assert "/polyreme-datahub" in cluster.kubectl("--namespace", SYSTEM, "get", "pvc", "-o", "name")
