"""What is done to a cluster while a job trains: helm upgrade and rollback do not touch it, a drain moves it.

One job goes through all tests of this module, in their order.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_api.labels import INSTALLATION_KEY_NAME
from tests.nodes import previous
from tests.nodes.cluster import Cluster, Manifest
from tests.nodes.release import DEVICES, SYSTEM, Job, Release, created, is_true, job, production_values, state
from tests.nodes.servers import Outside
from tests.services.test_runs_on_servers import shortened

PREVIOUS_CHART = Path(__file__).parent / "kept/polyreme-0.1.0.tgz"
PREVIOUS_TAG = "previous"
STEPS = 100_000
DRAIN_S_MAX = 300
RBAC = "rbac.authorization.k8s.io"
POSING = {"name": "today-with-the-rights-of-then"}
RIGHTS_OF_TODAY: list[Manifest] = [
    {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": POSING,
        "rules": [
            {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["create", "get"]},
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [INSTALLATION_KEY_NAME], "verbs": ["get"]},
            {"apiGroups": [""], "resources": ["limitranges", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["node.k8s.io"], "resources": ["runtimeclasses"], "verbs": ["list", "watch"]},
        ],
    },
    {
        "apiVersion": f"{RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": POSING,
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", **POSING},
        "subjects": [{"kind": "ServiceAccount", "name": "polyreme-operator", "namespace": SYSTEM}],
    },
]
"""What today's operator needs beside the rights of the earlier chart, where its images pose as those of then."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def training(
    cluster: Cluster, production: Release, servers: Outside, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    """A job that trains until it is deleted, started by the previous version."""
    for node in cluster.get("nodes")["items"]:
        cluster.offer(node["metadata"]["name"], DEVICES)
    if commit := os.environ.get(previous.VARIABLE):
        previous.load_previous(cluster, commit, PREVIOUS_TAG)
    else:
        cluster.tag(PREVIOUS_TAG)
        cluster.kubectl.apply(RIGHTS_OF_TODAY)
    earlier = production_values(cluster, servers.plain_values(), image={"tag": PREVIOUS_TAG})
    production.install(earlier, chart=PREVIOUS_CHART)
    folder = tmp_path_factory.mktemp("job")
    with created(cluster, job(cluster, shortened("long", folder, training={"steps": STEPS}))) as made:
        made.until(lambda status: status.get("step", 0) > 0 and is_true(status, "Running"), "it trains")
        yield made
    for each in RIGHTS_OF_TODAY:
        cluster.kubectl("delete", each["kind"].lower(), POSING["name"], "--ignore-not-found")


def until_it_trains_on(training: Job, by: int = 2) -> None:
    """Wait until it has trained some more steps."""
    step = training.status["step"]
    training.until(lambda status: status["step"] >= step + by and is_true(status, "Running"), "it trains on")


def test_an_upgrade_and_a_rollback_leave_pods_attempt_and_ranks_of_a_job_alone(
    cluster: Cluster, production: Release, servers: Outside, training: Job
) -> None:
    before = state(cluster, training)
    operators = ("--namespace", SYSTEM, "pods", "-l", "app.kubernetes.io/name=polyreme-operator")
    old = {pod["metadata"]["uid"] for pod in cluster.get(*operators)["items"]}
    production.install(production_values(cluster, servers.values()))
    new = [pod for pod in cluster.get(*operators)["items"] if "deletionTimestamp" not in pod["metadata"]]
    assert old.isdisjoint(pod["metadata"]["uid"] for pod in new), "nothing was upgraded"
    until_it_trains_on(training)
    assert state(cluster, training) == before
    production.helm("rollback", "polyreme")
    production.wait()
    pods = [pod for pod in cluster.get(*operators)["items"] if "deletionTimestamp" not in pod["metadata"]]
    images = {each["image"] for pod in pods for each in pod["spec"]["containers"]}
    assert {image.rpartition(":")[2] for image in images} == {PREVIOUS_TAG}
    until_it_trains_on(training)
    assert state(cluster, training) == before


def test_a_drained_node_is_left_and_the_job_trains_on_elsewhere(cluster: Cluster, training: Job) -> None:
    drained, other = (pod["spec"]["nodeName"] for pod in training.pods)
    attempt = training.status["attempt"]["number"]
    cluster.offer(other, 2 * DEVICES)
    words = ("drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--grace-period=5")
    try:
        cluster.kubectl(*words, f"--timeout={DRAIN_S_MAX}s", timeout_s=DRAIN_S_MAX + 10)
        training.until(
            lambda status: is_true(status, "Running") and status["attempt"]["number"] > attempt, "it trains elsewhere"
        )
        alive = [pod for pod in training.pods if "deletionTimestamp" not in pod["metadata"]]
        assert {pod["spec"]["nodeName"] for pod in alive} == {other}
    finally:
        cluster.kubectl("uncordon", drained)
