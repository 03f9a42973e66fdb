"""The operator as it is installed: processes of it with the rights of its service account, and nodes for its pods."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyreme_api import labels
from polyreme_cluster.port import ClusterPort, ConflictError, Manifest, NotFoundError, ObjectRef
from tests.cluster.kube import kubectl
from tools.charts.render import VALUES, rendered

NAMESPACE = "polyreme-system"
ACCOUNT = "polyreme-operator"
OWNED = "polyreme.dev/owned"
END_S = 30.0
PATIENCE_S = 120.0
POLL_S = 0.2
NO_RIGHT = "is forbidden: User "
"""What the API server's authorizer says; admission answers 403 too, for instance where a namespace ends in a pass."""
SIDE_BY_SIDE = 32


def install(kubeconfig: str, folder: Path, binding: str = "NodeAffinity") -> Path:
    """Apply everything but the Deployment, and return a kubeconfig of the operator's service account."""
    texts = rendered(VALUES, settings=[f"operator.binding={binding}"], templates=["namespace", "rbac"])
    rights = folder / "rights.yaml"
    rights.write_text(texts)
    kubectl(kubeconfig, "apply", "-f", str(rights))
    token = kubectl(kubeconfig, "create", "token", ACCOUNT, "--namespace", NAMESPACE, "--duration", "2h").strip()
    content: dict[str, Any] = yaml.safe_load(kubectl(kubeconfig, "config", "view", "--raw", "--minify", "--flatten"))
    content["users"][0]["user"] = {"token": token}
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
    return path


DEAD_PROXY = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
"""The operator never calls the API server by a proxy of its environment, whatever NO_PROXY says."""


class Replica:
    """One process of the operator."""

    def __init__(self, kubeconfig: Path, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "polyreme_operator", "--namespace", NAMESPACE, *options]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, env={**os.environ, **DEAD_PROXY, "KUBECONFIG": str(kubeconfig)}, stdout=out, stderr=out
            )

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End it by SIGTERM, as a kubelet does, and return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not ended {END_S} s after SIGTERM\n{self.said()}") from None

    def said(self) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextlib.contextmanager
def replica(kubeconfig: Path, log: Path, *options: str) -> Iterator[Replica]:
    """Run one replica, which must still run at the end and then stop by itself."""
    started = Replica(kubeconfig, log, *options)
    try:
        yield started
        assert started.runs, started.said()
        assert started.stop() == 0, started.said()
    except BaseException:
        print(started.said())
        raise
    finally:
        if started.runs:
            started.kill()


@contextlib.contextmanager
def operating(kubeconfig: str, folder: Path, *options: str) -> Iterator[None]:
    """Run the operator on a cluster; it must log no error and be refused no right."""
    log = folder / "operator.log"
    with replica(install(kubeconfig, folder), log, *options):
        yield
    said = log.read_text()
    assert '"level": "error"' not in said, said[-4000:]
    refused = [line for line in said.splitlines() if NO_RIGHT in line]
    assert not refused, refused[:3]


@contextlib.asynccontextmanager
async def nodes(
    cluster: ClusterPort, prefix: str, count: int, *, devices: int, owned: bool = False, kwok: bool = True
) -> AsyncIterator[str]:
    """Have ready nodes with devices; yield the resource that they offer."""
    resource = f"{labels.GROUP}/{prefix}"
    made = [_node(f"{prefix}-{at}", resource, devices, owned=owned, kwok=kwok) for at in range(count)]
    try:
        for manifest in await side_by_side([cluster.create(manifest) for manifest in made]):
            if any(taint["key"] == "node.kubernetes.io/not-ready" for taint in manifest["spec"].get("taints") or ()):
                await _untaint(cluster, ObjectRef.of(manifest))
        yield resource
    finally:
        await side_by_side([_delete(cluster, ObjectRef.of(manifest)) for manifest in made])


async def side_by_side(calls: Sequence[Any]) -> list[Any]:
    """Await many calls, some at a time."""
    gate = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(call: Any) -> Any:
        async with gate:
            return await call

    return list(await asyncio.gather(*(one(call) for call in calls)))


def gang(name: str, namespace: str, resource: str, workers: int, **spec: Any) -> Manifest:
    """A job of any framework's containers: nothing in it reports, so nothing but its pods is looked at."""
    container = {"name": "main", "image": "registry.example/none:1"}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
            "training": {"steps": 10, "packsPerStep": workers},
            "workers": {
                "replicas": workers,
                "devices": 1,
                "deviceResource": resource,
                "runtime": {"mode": "Environment"},
                "template": {"spec": {"containers": [container]}},
            },
            **spec,
        },
    }


async def pods_of(cluster: ClusterPort, namespace: str) -> list[Manifest]:
    """List all pods of a namespace."""
    found: list[Manifest] = []
    token: str | None = None
    while True:
        page = await cluster.list("Pod", namespace=namespace, continue_=token)
        found += page.items
        if (token := page.continue_) is None:
            return found


async def until_bound(
    cluster: ClusterPort, namespace: str, count: int, *, patience_s: float = PATIENCE_S
) -> list[Manifest]:
    """Wait until so many pods are there and each has its node."""
    pods: list[Manifest] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while True:
                pods = await pods_of(cluster, namespace)
                if sum(bool(pod["spec"].get("nodeName")) for pod in pods) >= count:
                    return pods
                await asyncio.sleep(POLL_S)
    bound = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
    jobs = [job.get("status") for job in (await cluster.list("TrainingJob", namespace=namespace)).items]
    raise AssertionError(f"{len(pods)} pods, {bound} bound, wanted {count}; jobs: {jobs}")


async def until_empty(cluster: ClusterPort, namespace: str, kinds: Sequence[str]) -> None:
    """Wait for the garbage collector."""
    async with asyncio.timeout(PATIENCE_S):
        for kind in kinds:
            while (await cluster.list(kind, namespace=namespace, limit=1)).items:
                await asyncio.sleep(POLL_S)


def _node(name: str, resource: str, devices: int, *, owned: bool, kwok: bool) -> Manifest:
    amounts = {resource: str(devices), "cpu": "64", "memory": "256Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"} if kwok else {},
            "labels": {"kubernetes.io/hostname": name},
        },
        "spec": {"taints": [{"key": OWNED, "effect": "NoSchedule"}] if owned else []},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


async def _untaint(cluster: ClusterPort, ref: ObjectRef) -> None:
    """Take off what admission puts on every new node, as the node's controller would in its own time."""
    while True:
        node = await cluster.get(ref)
        kept = [taint for taint in node["spec"].get("taints") or () if taint["key"] != "node.kubernetes.io/not-ready"]
        try:
            await cluster.patch(ref, {"spec": {"taints": kept}}, resource_version=node["metadata"]["resourceVersion"])
        except ConflictError:
            continue
        return


async def _delete(cluster: ClusterPort, ref: ObjectRef) -> None:
    with contextlib.suppress(NotFoundError):
        await cluster.delete(ref, uid=(await cluster.get(ref))["metadata"]["uid"])
