"""What the contract's one namespace does not show: all namespaces, kinds of the cluster, many calls, KWOK's nodes."""

import asyncio
import contextlib
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api import labels
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.adapters.kubernetes.resources import RESOURCES, Resource
from polyreme_cluster.port import (
    InvalidObjectError,
    Manifest,
    NotFoundError,
    ObjectRef,
    ServerError,
    WatchEventType,
)
from tests.cluster.kube import api_client, kubectl, new_namespace
from tests.cluster.outages import Line, line_to
from tests.contract.manifests import job, lease, pod, ref, uid

PATIENCE_S = 60.0
POLL_S = 0.05
CALLS = 200
CONNECTIONS = 4
WATCHES = 16


def test_lists_and_watches_reach_over_all_namespaces_in_pages(kubeconfig: str) -> None:
    async def story(one: str, two: str) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            start = (await cluster.list("Lease", limit=1)).resource_version
            made = [await cluster.create(lease(f"l{at}", namespace=space)) for space in (one, two) for at in range(3)]
            listed, token = list[Manifest](), None
            while True:
                page = await cluster.list("Lease", limit=2, continue_=token)
                assert len(page.items) <= 2
                listed += page.items
                if (token := page.continue_) is None:
                    break
            assert all(manifest in listed for manifest in made)
            wanted = {uid(manifest) for manifest in made}
            async with asyncio.timeout(PATIENCE_S):
                async for event in cluster.watch("Lease", resource_version=start):
                    if event.type is WatchEventType.ADDED:
                        wanted.discard(uid(event.object))
                    if not wanted:
                        break

    with api_client(kubeconfig) as api, new_namespace(api) as one, new_namespace(api) as two:
        asyncio.run(story(one, two))


def test_many_calls_share_a_few_connections(kubeconfig: str) -> None:
    async def story(namespace: str) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig), connections_max=CONNECTIONS) as cluster:
            await asyncio.gather(*(cluster.create(lease(f"l{at}", namespace=namespace)) for at in range(CALLS)))
            assert len((await cluster.list("Lease", namespace=namespace)).items) == CALLS

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(story(namespace))


def test_watches_that_are_given_up_leave_no_socket_behind(
    kubeconfig: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(cluster: KubernetesCluster, version: str) -> None:
        async for _ in cluster.watch("Pod", resource_version=version):
            pass

    async def story(line: Line) -> None:
        async with KubernetesCluster(from_kubeconfig(ours)) as cluster:
            version = (await cluster.list("Lease", limit=1)).resource_version
            watches = [asyncio.ensure_future(follow(cluster, version)) for _ in range(WATCHES)]
            # Long enough for each to be answered: it is an open stream that is given up.
            await asyncio.sleep(0.5)
            # TLS says good-bye and waits for an answer, which never comes here.
            line.hold()
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    ours = tmp_path / "kubeconfig"
    shutil.copy(kubeconfig, ours)
    said: list[str] = []
    with line_to(ours) as line:
        asyncio.run(story(line))
        monkeypatch.setattr("sys.unraisablehook", lambda raised: said.append(str(raised.exc_value)))
        gc.collect()
    assert said == []


async def test_a_kind_that_is_not_installed_is_not_found(kubeconfig: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Resource(kind="TrainingQueue", api_version=labels.API_VERSION, plural="notinstalled")
    monkeypatch.setitem(RESOURCES, "TrainingQueue", elsewhere)
    async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
        with pytest.raises(NotFoundError):
            await cluster.list("TrainingQueue")
        with pytest.raises(NotFoundError):
            await anext(cluster.watch("TrainingQueue", resource_version="1"))


def test_a_job_that_its_schema_refuses_is_refused_with_the_field(kubeconfig: str) -> None:
    async def story(namespace: str) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            manifest = job(namespace=namespace)
            manifest["spec"]["workers"]["replicas"] = -1
            with pytest.raises(InvalidObjectError) as caught:
                await cluster.create(manifest)
            assert caught.value.field == "spec.workers.replicas"

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(story(namespace))


def test_wrong_credentials_are_an_error_that_time_may_mend(kubeconfig: str, tmp_path: Path) -> None:
    async def story(path: Path) -> None:
        async with KubernetesCluster(from_kubeconfig(path)) as cluster:
            with pytest.raises(ServerError, match="401"):
                await cluster.list("Pod")

    content: dict[str, Any] = yaml.safe_load(kubectl(kubeconfig, "config", "view", "--raw", "--minify"))
    content["users"][0]["user"] = {"token": "nobody"}
    wrong = tmp_path / "kubeconfig"
    wrong.write_text(yaml.safe_dump(content))
    asyncio.run(story(wrong))


def test_kwok_runs_what_the_scheduler_binds_to_its_nodes(kubeconfig: str) -> None:
    async def story(namespace: str) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            node = await cluster.create(fake_node(namespace))
            try:
                await until(cluster, ref(node), ready, "KWOK makes the node ready; does the cluster run KWOK?")
                wanted = pod(node=None)
                wanted["metadata"]["namespace"] = namespace
                wanted["spec"]["nodeSelector"] = {"polyreme.dev/test": namespace}
                wanted["spec"]["tolerations"] = [{"operator": "Exists"}]
                made = await cluster.create(wanted)
                await until(cluster, ref(made), lambda seen: seen["status"]["phase"] == "Running", "the pod runs")
                assert (await cluster.get(ref(made)))["spec"]["nodeName"] == namespace
                await cluster.delete(ref(made), uid=uid(made))
                await until_gone(cluster, ref(made))
            finally:
                await cluster.delete(ref(node), uid=uid(node))

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(story(namespace))


def fake_node(name: str) -> Manifest:
    metadata = {
        "name": name,
        "annotations": {"kwok.x-k8s.io/node": "fake"},
        "labels": {"polyreme.dev/test": name, "kubernetes.io/hostname": name},
    }
    taints = [{"key": "polyreme.dev/test", "value": name, "effect": "NoSchedule"}]
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}}


def ready(node: Manifest) -> bool:
    conditions = node.get("status", {}).get("conditions") or []
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


async def until(cluster: KubernetesCluster, ref: ObjectRef, holds: Callable[[Manifest], bool], what: str) -> None:
    """Poll one object until something holds of it."""
    for _ in range(int(PATIENCE_S / POLL_S)):
        if holds(await cluster.get(ref)):
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"never: {what}")


async def until_gone(cluster: KubernetesCluster, ref: ObjectRef) -> None:
    with contextlib.suppress(NotFoundError):
        await until(cluster, ref, lambda _: False, f"{ref} is gone")
