"""The installed operator on a real API server: it binds gangs both ways, leaves nothing, and survives kill -9."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.election import LEASE_NAME
from polyreme_cluster.port import Manifest, ObjectRef
from tests.cluster.kube import api_client, kubectl, new_namespace
from tests.cluster.operators import (
    NAMESPACE,
    Replica,
    gang,
    install,
    nodes,
    pods_of,
    replica,
    until_bound,
    until_empty,
)

WORKERS = 12
LAUNCH_PODS = 1_000
LAUNCH_NODES = 250
KILLS = 4
LAUNCH_S = 240.0
OWNED_KINDS = ("Pod", "Lease", "Secret", "Service", "Role", "RoleBinding")


def tell(kubeconfig: str, story: Callable[[KubernetesCluster, str], Coroutine[Any, Any, None]]) -> None:
    """Tell a story in a namespace of its own."""

    async def told(namespace: str) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            await story(cluster, namespace)

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(told(namespace))


@pytest.mark.parametrize("mode", ["NodeAffinity", "GangBinder"])
def test_a_gang_is_launched_and_bound_and_goes_with_its_job(kubeconfig: str, tmp_path: Path, mode: str) -> None:
    async def story(cluster: KubernetesCluster, namespace: str) -> None:
        log = tmp_path / "operator.log"
        async with nodes(cluster, namespace, 4, devices=3, owned=mode == "GangBinder") as resource:
            with replica(install(kubeconfig, tmp_path, mode), log, "--binding", mode):
                await cluster.create(gang("small", namespace, resource, WORKERS))
                pods = await until_bound(cluster, namespace, WORKERS)
                assert Counter(pod["spec"]["nodeName"] for pod in pods) == {f"{namespace}-{at}": 3 for at in range(4)}
                schedulers = {pod["spec"]["schedulerName"] for pod in pods}
                assert schedulers == ({"polyreme"} if mode == "GangBinder" else {"default-scheduler"})
                assert sorted(int(pod["metadata"]["labels"][labels.LABEL_INDEX]) for pod in pods) == list(
                    range(WORKERS)
                )
            assert '"level": "error"' not in log.read_text()
            assert " 403 " not in log.read_text()
            # The operator is gone: owner references do it, and no finalizer holds it.
            job = await cluster.get(ObjectRef(kind=labels.KIND_JOB, namespace=namespace, name="small"))
            assert not job["metadata"].get("finalizers")
            assert not job["metadata"].get("annotations")
            await asyncio.to_thread(kubectl, kubeconfig, "-n", namespace, "delete", "tj", "small", "--timeout=30s")
            await until_empty(cluster, namespace, OWNED_KINDS)

    tell(kubeconfig, story)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killing_the_leader_again_and_again_during_a_launch_doubles_and_loses_nothing(
    kubeconfig: str, tmp_path: Path
) -> None:
    rng = random.Random(11)

    async def story(cluster: KubernetesCluster, namespace: str) -> None:
        account = install(kubeconfig, tmp_path, "GangBinder")
        options = ("--binding", "GangBinder")
        replicas = [Replica(account, tmp_path / f"replica-{at}.log", *options) for at in range(2)]
        seen: dict[int, set[str]] = {}
        watching = asyncio.ensure_future(_watch_places(cluster, namespace, seen))
        try:
            async with nodes(cluster, namespace, LAUNCH_NODES, devices=4, owned=True) as resource:
                await cluster.create(_queue(namespace, resource, LAUNCH_PODS))
                await cluster.create(gang("large", namespace, resource, LAUNCH_PODS, queueName=namespace))
                # Jobs of the same second are ordered by UID: only once the first is admitted is the other the next.
                await _until_pods(cluster, namespace, 1)
                await cluster.create(gang("next", namespace, resource, WORKERS, queueName=namespace))
                for number in range(KILLS):
                    wanted = rng.randrange(LAUNCH_PODS * number // KILLS, LAUNCH_PODS * (number + 1) // KILLS)
                    await _until_pods(cluster, namespace, wanted)
                    # The leader dies in the middle of its writes; another replica takes its place as the standby.
                    replicas.append(Replica(account, tmp_path / f"replica-{len(replicas)}.log", *options))
                    (await _leader(cluster, replicas)).kill()
                pods = await until_bound(cluster, namespace, LAUNCH_PODS, patience_s=LAUNCH_S)
                await asyncio.sleep(3.0)
                pods = await pods_of(cluster, namespace)
                places = Counter(
                    (pod["metadata"]["labels"][labels.LABEL_JOB], pod["metadata"]["labels"][labels.LABEL_INDEX])
                    for pod in pods
                )
                assert len(places) == LAUNCH_PODS
                assert set(places.values()) == {1}, "no place has two pods, and the quota lets no second job in"
                assert {name for name, _ in places} == {"large"}
                assert all(len(uids) == 1 for uids in seen.values()), "no place ever had two live pods"
                assert Counter(Counter(pod["spec"]["nodeName"] for pod in pods).values()) == {4: LAUNCH_NODES}
        finally:
            watching.cancel()
            for process in replicas:
                if process.runs:
                    process.kill()
            queue = ObjectRef(kind="TrainingQueue", name=namespace)
            await cluster.delete(queue, uid=(await cluster.get(queue))["metadata"]["uid"])

    tell(kubeconfig, story)


def _queue(name: str, resource: str, nominal: int) -> Manifest:
    spec = {"quotas": [{"resource": resource, "nominal": nominal}]}
    return {"apiVersion": labels.API_VERSION, "kind": "TrainingQueue", "metadata": {"name": name}, "spec": spec}


async def _until_pods(cluster: KubernetesCluster, namespace: str, count: int) -> None:
    async with asyncio.timeout(LAUNCH_S):
        while len(await pods_of(cluster, namespace)) < count:
            await asyncio.sleep(0.05)


async def _leader(cluster: KubernetesCluster, replicas: list[Replica]) -> Replica:
    """Find the process that holds the Lease, by what it logged."""
    ref = ObjectRef(kind="Lease", namespace=NAMESPACE, name=LEASE_NAME)
    async with asyncio.timeout(LAUNCH_S):
        while True:
            holder = (await cluster.get(ref))["spec"].get("holderIdentity") or "nobody"
            for process in replicas:
                if process.runs and any(holder in line for line in process.log.read_text().splitlines()):
                    return process
            await asyncio.sleep(0.1)


async def _watch_places(cluster: KubernetesCluster, namespace: str, seen: dict[int, set[str]]) -> None:
    """Note which pods every place of the large job has at a time."""
    version = (await cluster.list("Pod", namespace=namespace, limit=1)).resource_version
    while True:
        async for event in cluster.watch("Pod", resource_version=version, namespace=namespace):
            version = event.resource_version
            tags = (event.object["metadata"].get("labels") or {}) if event.type != "BOOKMARK" else {}
            if tags.get(labels.LABEL_JOB) != "large":
                continue
            uids = seen.setdefault(int(tags[labels.LABEL_INDEX]), set())
            if event.type == "DELETED":
                uids.discard(event.object["metadata"]["uid"])
            else:
                uids.add(event.object["metadata"]["uid"])
            if len(uids) > 1:
                raise AssertionError(json.dumps(tags))
