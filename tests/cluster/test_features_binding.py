"""The gang binder on real pods: what needs a scheduler's other work is refused by name, and nothing of it is bound."""

from collections.abc import Iterator

import pytest

from polyreme_cluster.port import Manifest, ObjectRef
from tests.cluster.operators import OWNED, install, replica
from tests.cluster.stage import Stage, condition_of, play

TAINT = {"key": OWNED, "effect": "NoSchedule"}
NEAR = {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "kubernetes.io/hostname"}
CLAIM_SPEC = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
REFUSED: dict[str, tuple[Manifest, str, str]] = {
    "claim": (
        {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "late"}}]},
        "volume data (persistentVolumeClaim)",
        "volumes[].persistentVolumeClaim",
    ),
    "ephemeral": (
        {"volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": CLAIM_SPEC}}}]},
        "volume scratch (ephemeral)",
        "volumes[].ephemeral",
    ),
    "devices": (
        {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]},
        "resource claims (gpu)",
        "resourceClaims",
    ),
    "near": (
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [NEAR]}}},
        "podAffinity",
        "affinity.podAffinity",
    ),
    "apart": (
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [NEAR]}}},
        "podAntiAffinity",
        "affinity.podAntiAffinity",
    ),
    "spread": (
        {"topologySpreadConstraints": [{**NEAR, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]},
        "topology spread constraints (kubernetes.io/hostname)",
        "topologySpreadConstraints",
    ),
    "port": (
        {
            "containers": [
                {"name": "main", "image": "none.example/none:1", "ports": [{"containerPort": 80, "hostPort": 8080}]}
            ]
        },
        "ports of their host (8080)",
        "containers[].ports[].hostPort",
    ),
    "gated": (
        {"schedulingGates": [{"name": "example.com/later"}]},
        "scheduling gates (example.com/later)",
        "schedulingGates",
    ),
}


@pytest.fixture(scope="module")
def bound_by_us(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the kubeconfig of a cluster on which the operator runs and binds pods by itself."""
    folder = tmp_path_factory.mktemp("operator")
    log = folder / "operator.log"
    with replica(install(kubeconfig, folder, "GangBinder"), log, "--binding", "GangBinder"):
        yield kubeconfig
    assert '"level": "error"' not in log.read_text(), log.read_text()[-4000:]


def test_what_the_gang_binder_can_not_do_is_refused_by_field_and_rule_and_nothing_is_bound(bound_by_us: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=8, taints=[TAINT])
        await stage.queue()
        await _claim_that_binds_late(stage)
        for name, (body, _, _) in REFUSED.items():
            await stage.job(name, 2, body=body)
        for name, (_, what, field) in REFUSED.items():
            status = await stage.until_job(name, lambda seen: condition_of(seen, "Failed")[0] == "True", "is refused")
            _, reason, message = condition_of(status, "Failed")
            assert reason == "Misconfigured"
            assert what in message
            assert "it ignores volumes, resource claims, other pods and host ports" in message
            assert f"remove spec.workers.template.spec.{field} or install the operator with binding" in message
            assert not status.get("attempt")
        # The room was there all the time: a job that asks for nothing of the kind gets it.
        await stage.job("plain", 2)
        await stage.until_trains("plain")
        assert {pod["spec"]["schedulerName"] for pod in await stage.pods("plain")} == {"polyreme"}
        for name in REFUSED:
            assert not await stage.pods(name)
        assert await stage.kubectl("get", "pvc", "late", "-o", "jsonpath={.status.phase}") == "Pending"
        await stage.kubectl("delete", "storageclass", stage.name("late"))

    play(bound_by_us, story)


def test_on_nodes_of_others_the_same_gang_is_bound_by_the_clusters_scheduler(bound_by_us: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue()
        await stage.job("shared", 2)
        await stage.until_trains("shared")
        assert {pod["spec"]["schedulerName"] for pod in await stage.pods("shared")} == {"default-scheduler"}

    play(bound_by_us, story)


def test_a_taint_that_sends_pods_away_sends_them_elsewhere_for_good(bound_by_us: str) -> None:
    async def story(stage: Stage) -> None:
        for word in ("a", "b"):
            await stage.node(word, taints=[TAINT])
        await stage.queue()
        await stage.job("runs")
        await stage.until_trains("runs")
        (pod,) = await stage.pods("runs")
        node = pod["spec"]["nodeName"]
        broken = {"key": "example.com/broken", "value": "yes", "effect": "NoExecute"}
        await stage.change(ObjectRef(kind="Node", name=node), {"spec": {"taints": [TAINT, broken]}})
        status = await stage.until_trains("runs", attempt=2)
        (after,) = await stage.pods("runs")
        assert after["spec"]["nodeName"] not in {"", node}
        assert status["restarts"] == 1

    play(bound_by_us, story)


async def _claim_that_binds_late(stage: Stage) -> None:
    """Make a claim that is bound only when a scheduler has chosen the node of its first pod."""
    name = stage.name("late")
    await stage.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "late"},
            "spec": {**CLAIM_SPEC, "storageClassName": name},
        },
    )
