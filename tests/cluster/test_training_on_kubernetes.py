"""A real job under a real API server: applied by kubectl, run by the operator, trained by real ranks here."""

import asyncio
import contextlib
import dataclasses
import json
import random
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kubernetes import client

from polyreme.run_files.paths import Home
from polyreme.run_files.records import read_records
from polyreme_api import environment, labels
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.progress import StepRecord
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import ClusterPort, Manifest, ObjectRef
from polyreme_datahub.hub import process
from polyreme_local.kubelet.kubelet import ProcessKubelet
from polyreme_local.kubelet.settings import KubeletSettings
from polyreme_operator.controller import run_operator
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_system.clock import SystemClock
from tests.cluster.kube import InNamespace, api_client, kubectl, new_namespace

STEPS = 6
ENDLESS_STEPS, STEPS_LEFT = 100_000, 200
"""More than a job ever trains, and what it is left with: more than it trains until its ranks have read that."""
PATIENCE_S = 240.0
HEARTBEAT_S = 10.0
TOKEN_S = 3600


class Machine:
    """This machine as one node of the cluster, and the operator beside it.

    Args:
        root: Folder of home and pods.
        kubeconfig: The cluster.
        api: The library's client, for what no part of ours does: service accounts and roles.
        namespace: Whose jobs are served.
    """

    def __init__(self, root: Path, kubeconfig: str, api: Any, namespace: str) -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace
        self.home = Home(path=root / "home")
        self.node = namespace
        self.resource = f"{labels.GROUP}/{namespace}"
        self.tokens: dict[str, str] = {}
        self._root, self._api = root, api
        self._clock = SystemClock()

    @contextlib.asynccontextmanager
    async def serving(self, settings: Settings | None = None) -> AsyncIterator[ClusterPort]:
        """Run operator and kubelet; yield the port."""
        self.home.prepare_data()
        async with KubernetesCluster(from_kubeconfig(self.kubeconfig)) as cluster:
            port = InNamespace(cluster, self.namespace)
            work = [
                asyncio.ensure_future(self._kubelet(port).run()),
                asyncio.ensure_future(self._operator(port, settings)),
            ]
            try:
                yield port
            finally:
                for task in work:
                    task.cancel()
                ends = await asyncio.gather(*work, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
                node = await cluster.get(ObjectRef(kind="Node", name=self.node))
                await cluster.delete(ObjectRef.of(node), uid=node["metadata"]["uid"])

    def manifest(self, name: str, *, steps: int = STEPS) -> Manifest:
        """A job of two workers that takes some seconds."""
        spec = {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sequenceTokens": 160, "seed": 17, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
            "training": {"steps": steps, "packsPerStep": 2, "seed": 1},
            "parallelism": {"mode": "Explicit", "dp": 2, "ep": 1},
            "workers": {"replicas": 2, "devices": 1, "deviceResource": self.resource, "hardware": "cpu"},
            "checkpoint": {"everySteps": 3, "keep": 2},
        }
        metadata = {"name": name, "namespace": self.namespace}
        return {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB, "metadata": metadata, "spec": spec}

    async def process_data(self, job: Manifest) -> None:
        """Do what `polyreme data` does for a job."""
        await asyncio.to_thread(
            process,
            TrainingJobSpec.model_validate(job["spec"]),
            registry_url=self.home.registry_url,
            objects_url=self.home.objects_url,
            job=job["metadata"]["uid"],
        )

    def _kubelet(self, port: ClusterPort) -> ProcessKubelet:
        authority = self._api.configuration.ssl_ca_cert
        return ProcessKubelet(
            port,
            KubeletSettings(
                node=self.node,
                devices=4,
                directory=self._root / "pods",
                run_token=secrets.token_hex(16),
                api_url=self._api.configuration.host,
                token_for=self._token,
                device_resource=self.resource,
                # In a cluster the authority lies in the pod; a process finds it by OpenSSL's own variable.
                variables={} if authority is None else {"SSL_CERT_FILE": authority},
                heartbeat_s=HEARTBEAT_S,
            ),
            clock=self._clock,
        )

    async def _operator(self, port: ClusterPort, settings: Settings | None) -> None:
        variables = (
            (environment.OBJECTS_URL, self.home.objects_url),
            ("OMP_NUM_THREADS", "1"),
            ("GLOO_SOCKET_IFNAME", "lo"),
        )
        root = self.home.checkpoint_root.as_uri()
        defaults = PodDefaults(checkpoint_root=root, environment=variables, launcher_rbac=True)
        settings = dataclasses.replace(settings or Settings(), namespace=self.namespace, defaults=defaults)
        await run_operator(port, self._clock, settings=settings, rng=random.Random(7), entropy=secrets.token_bytes)

    def _token(self, pod: Manifest) -> str:
        """Token of the pod's service account."""
        core: Any = client.CoreV1Api(self._api)
        account = pod["spec"]["serviceAccountName"]
        request = {"spec": {"expirationSeconds": TOKEN_S}}
        answer = core.create_namespaced_service_account_token(account, self.namespace, request)
        self.tokens[account] = str(answer.status.token)
        return self.tokens[account]


@pytest.mark.slow
def test_a_job_that_kubectl_applies_trains_to_its_end_and_goes_when_it_is_deleted(
    kubeconfig: str, tmp_path: Path
) -> None:
    async def story(machine: Machine) -> None:
        async with machine.serving() as port:
            path = tmp_path / "job.yaml"
            path.write_text(yaml.safe_dump(machine.manifest("tiny", steps=ENDLESS_STEPS)))
            await kubectl_in(machine, "apply", "-f", str(path))
            ref = ObjectRef(kind=labels.KIND_JOB, namespace=machine.namespace, name="tiny")
            await machine.process_data(await port.get(ref))
            steps = await move_end(machine)
            job = await finished(port, ref, tmp_path)
            assert job.status.is_true("Succeeded"), job.status
            assert job.status.attempt is not None
            assert job.status.attempt.number == 1, "no restart for another end"
            assert [record.step for record in history(machine)] == list(range(1, steps + 1))
            shown = await kubectl_in(machine, "get", "trainingjobs")
            assert "tiny" in shown
            await no_more_than_its_own(machine)
            await until_no_pod_runs(port)
        # Neither operator nor kubelet is left: owner references do it, and no finalizer holds it.
        await kubectl_in(machine, "delete", "trainingjob", "tiny")
        await until_nothing_is_left(machine)

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(story(Machine(tmp_path, kubeconfig, api, namespace)))


def history(machine: Machine) -> list[StepRecord]:
    return list(read_records(machine.home.checkpoint_root / machine.namespace / "tiny").history)


async def move_end(machine: Machine) -> int:
    """Give the job that trains other steps; return their number."""
    async with asyncio.timeout(PATIENCE_S):
        while not (trained := history(machine)):
            await asyncio.sleep(0.1)
    steps = trained[-1].step + STEPS_LEFT
    change = json.dumps({"spec": {"training": {"steps": steps}}})
    await kubectl_in(machine, "patch", "trainingjob", "tiny", "--type=merge", "-p", change)
    return steps


async def kubectl_in(machine: Machine, *arguments: str) -> str:
    return await asyncio.to_thread(kubectl, machine.kubeconfig, "--namespace", machine.namespace, *arguments)


async def finished(port: ClusterPort, ref: ObjectRef, root: Path) -> TrainingJob:
    """Wait for the end of a job."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while not (job := parse_job(await port.get(ref))).status.finished:
                await asyncio.sleep(0.1)
            return job
    state = json.dumps((await port.get(ref)).get("status"), indent=1)
    logs = "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(root.rglob("*.log")))
    raise AssertionError(f"not finished within {PATIENCE_S} s\n{state}\n{logs}")


async def no_more_than_its_own(machine: Machine) -> None:
    """The launcher's token reads its job, and neither pods, secrets nor another job."""
    (token,) = machine.tokens.values()
    connection = from_kubeconfig(machine.kubeconfig)
    root = f"{connection.url}/apis/{labels.API_VERSION}/namespaces/{machine.namespace}/{labels.PLURAL_JOB}"
    paths = {
        f"{root}/tiny": 200,
        f"{root}/another": 403,
        root: 403,
        f"{connection.url}/api/v1/namespaces/{machine.namespace}/pods": 403,
        f"{connection.url}/api/v1/namespaces/{machine.namespace}/secrets": 403,
    }
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        for path, expected in paths.items():
            async with session.get(path, ssl=connection.tls or True) as response:
                assert response.status == expected, path


async def until_no_pod_runs(port: ClusterPort) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(pod["status"]["phase"] == "Running" for pod in (await port.list("Pod")).items):
            await asyncio.sleep(0.1)


async def until_nothing_is_left(machine: Machine) -> None:
    """Wait for the garbage collector."""
    async with KubernetesCluster(from_kubeconfig(machine.kubeconfig)) as cluster, asyncio.timeout(PATIENCE_S):
        for kind in ("Pod", "Lease", "Secret", "Service", "ServiceAccount", "Role", "RoleBinding"):
            while [each for each in (await cluster.list(kind, namespace=machine.namespace)).items if is_a_jobs(each)]:
                await asyncio.sleep(0.1)


def is_a_jobs(manifest: Manifest) -> bool:
    """Tell whether a job owned an object: not the namespace's own account, nor the operator's key."""
    return labels.LABEL_JOB_UID in (manifest["metadata"].get("labels") or {})
