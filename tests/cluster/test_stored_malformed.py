"""What a definition with relaxed validation lets through, on a real API server: it stops only its own job."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client import ApiException

from polyreme_api import labels
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import STATUS_SUBRESOURCE, InvalidObjectError, Manifest, ObjectRef
from tests.cluster.kube import ROOT, api_client, apply_crds, kubectl, new_namespace, until
from tests.cluster.operators import gang, install, nodes, replica, until_bound

PATIENCE_S = 60.0
POLL_S = 0.2
CRD = f"{labels.PLURAL_JOB}.{labels.GROUP}"


@contextlib.contextmanager
def relaxed(kubeconfig: str) -> Iterator[None]:
    """Have a definition of TrainingJobs that checks nothing, and the right one again after it."""
    with api_client(kubeconfig) as api:
        extensions: Any = client.ApiextensionsV1Api(api)

        def relax() -> bool:
            known = extensions.read_custom_resource_definition(CRD)
            anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            known.spec.versions[0].schema.open_apiv3_schema = anything
            try:
                extensions.replace_custom_resource_definition(CRD, known)
            except ApiException as error:
                if error.status != 409:
                    raise
                return False
            return True

        until(relax, "the definition is relaxed")
        try:
            yield
        finally:
            apply_crds(kubeconfig)


def test_plain_kubectl_apply_takes_the_definition_and_the_server_refuses_a_malformed_template(kubeconfig: str) -> None:
    path = ROOT / f"manifests/crds/{labels.GROUP}_{labels.PLURAL_JOB}.yaml"
    kubectl(kubeconfig, "apply", "-f", str(path))

    async def refused(namespace: str) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            with pytest.raises(InvalidObjectError, match=r"spec\.workers\.template\.spec\.affinity"):
                await cluster.create(malformed("typo", namespace, "polyreme.dev/none"))

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(refused(namespace))


def test_a_stored_malformed_job_gets_a_reason_and_the_others_are_admitted(kubeconfig: str, tmp_path: Path) -> None:
    async def story(namespace: str) -> None:
        async with (
            KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster,
            nodes(cluster, namespace, 2, devices=1) as resource,
        ):
            with relaxed(kubeconfig), replica(install(kubeconfig, tmp_path), tmp_path / "operator.log"):
                await stored(cluster, malformed("typo", namespace, resource))
                await cluster.create(gang("fine", namespace, resource, 1))
                await until_bound(cluster, namespace, 1)
                failed = await condition(cluster, namespace, "typo", "Failed")
                assert failed["reason"] == "Misconfigured"
                assert 'template.spec.affinity: must be an object, got the string "spread"' in failed["message"]
                broken = {"status": {"attempt": {"number": "x"}}}
                await cluster.patch(ref(namespace, "fine"), broken, subresource=STATUS_SUBRESOURCE)
                degraded = await condition(cluster, namespace, "fine", "Degraded")
                assert degraded["reason"] == "Unreadable"
                await cluster.create(gang("second", namespace, resource, 1))
                await until_bound(cluster, namespace, 2)

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(story(namespace))


def malformed(name: str, namespace: str, resource: str) -> Manifest:
    job = gang(name, namespace, resource, 1)
    job["spec"]["workers"]["template"]["spec"]["affinity"] = "spread"
    return job


async def stored(cluster: KubernetesCluster, manifest: Manifest) -> None:
    """Create an object as soon as the server has taken up the relaxed definition."""

    async def taken() -> bool:
        try:
            await cluster.create(manifest)
        except InvalidObjectError:
            return False
        return True

    async with asyncio.timeout(PATIENCE_S):
        while not await taken():
            await asyncio.sleep(POLL_S)


async def condition(cluster: KubernetesCluster, namespace: str, name: str, kind: str) -> Manifest:
    """Wait until a condition of a job is True."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            job = await cluster.get(ref(namespace, name))
            for each in job.get("status", {}).get("conditions") or ():
                if each["type"] == kind and each["status"] == "True":
                    return dict(each)
            await asyncio.sleep(POLL_S)


def ref(namespace: str, name: str) -> ObjectRef:
    return ObjectRef(kind=labels.KIND_JOB, namespace=namespace, name=name)
