"""On a real API server the controller scales its Deployments with a right to patch their ``scale`` and nothing more."""

import asyncio
from pathlib import Path
from typing import Any

import yaml

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_datahub.registry.backlog import Backlog
from polyreme_datahub.runner.pool_sizes import PoolLimits
from polyreme_datahub_service.metrics import DataMetrics
from polyreme_datahub_service.work_watch import PoolScaler, WorkerPools
from tests.cluster.kube import api_client, kubectl, new_namespace

NAME = "polyreme-datahub-workers"
ACCOUNT = "scaler"


def manifests(namespace: str) -> list[dict[str, Any]]:
    """Two Deployments, and an account that may scale the first."""
    rule = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": [NAME], "verbs": ["patch"]}
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
    }
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": ACCOUNT}}
    return [
        *(deployment(name) for name in (NAME, f"{NAME}-gpu")),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
        {**rbac, "kind": "Role", "rules": [rule]},
        {**rbac, "kind": "RoleBinding", **binding},
    ]


def deployment(name: str) -> dict[str, Any]:
    tags = {"app": name}
    pod = {"metadata": {"labels": tags}, "spec": {"containers": [{"name": "worker", "image": "none"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": tags}, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def credentials(kubeconfig: str, namespace: str, folder: Path) -> Path:
    """Create everything, and return a kubeconfig of the account."""
    wanted = folder / "scaling.yaml"
    wanted.write_text(yaml.safe_dump_all(manifests(namespace)))
    kubectl(kubeconfig, "apply", "--namespace", namespace, "-f", str(wanted))
    token = kubectl(kubeconfig, "create", "token", ACCOUNT, "--namespace", namespace).strip()
    content: dict[str, Any] = yaml.safe_load(kubectl(kubeconfig, "config", "view", "--raw", "--minify", "--flatten"))
    content["users"][0]["user"] = {"token": token}
    path = folder / "scaler.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
    return path


def test_deployments_are_scaled_by_their_names_and_a_missing_right_is_one_sentence(
    kubeconfig: str, tmp_path: Path
) -> None:
    def replicas(name: str) -> int:
        said = kubectl(kubeconfig, "get", "deployment", name, "-n", namespace, "-o", "jsonpath={.spec.replicas}")
        return int(said)

    async def story() -> None:
        limits = PoolLimits(most=3, cooldown_s=60.0)
        pools = WorkerPools(
            deployment=NAME,
            namespace=namespace,
            operations=frozenset({"compose", "embed"}),
            limits={"cpu": limits, "gpu": limits},
        )
        async with KubernetesCluster(from_kubeconfig(mine)) as cluster:
            scaler = PoolScaler(cluster, pools, DataMetrics())
            compose = Backlog(operation="compose", device="cpu", items=500, records=500, leased=0)
            embed = Backlog(operation="embed", device="gpu", items=500, records=500, leased=0)
            await scaler.size([compose], {}, now_s=0.0)
            assert (await asyncio.to_thread(replicas, NAME), scaler.trouble) == (3, "")
            await scaler.size([compose, embed], {}, now_s=5.0)
            assert f"the workers {namespace}/{NAME}-gpu can't be scaled: " in scaler.trouble
            assert "403" in scaler.trouble
            await scaler.size([], {}, now_s=10.0)
            await scaler.size([], {}, now_s=75.0)
            assert (await asyncio.to_thread(replicas, NAME), scaler.trouble) == (0, "")

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        mine = credentials(kubeconfig, namespace, tmp_path)
        asyncio.run(story())
