"""A namespace with nodes, queues and jobs of its own, for one scenario of the running operator."""

import asyncio
import contextlib
import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.plugin.main import invoke
from polyreme_api import labels
from polyreme_api.job.placement import Placement
from polyreme_api.times import rfc3339
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import ClusterPort, ConflictError, Manifest, NotFoundError, ObjectRef
from polyreme_system.clock import SystemClock
from tests.cluster.hollow import HollowLaunchers
from tests.cluster.kube import api_client, kubectl, new_namespace
from tests.cluster.operators import pods_of, side_by_side

PATIENCE_S = 45.0
TOLD_S = 15.0
"""A queue's status follows what happens; it waits for no other round, which may come half a minute later."""
POLL_S = 0.1
STEADY_S = 2.0
"""How long something that must not happen is given to happen."""
BLOCK, RACK = "test.polyreme.dev/block", "test.polyreme.dev/rack"
OF_JOBS = frozenset({"get", "describe", "why", "top", "logs", "suspend", "resume", "scale", "cancel"})
"""Verbs of the plugin that take a namespace."""
NOT_READY = "node.kubernetes.io/not-ready"
KWOK = "kwok.x-k8s.io/node"


class Stage:
    """What a story has and does."""

    def __init__(self, cluster: ClusterPort, kubeconfig: str, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace = cluster, namespace
        self._kubeconfig, self._folder = kubeconfig, folder
        self.resource = f"{labels.GROUP}/{namespace}"
        """Devices that only this story's nodes have."""
        self.hollow = HollowLaunchers(cluster, namespace)
        self._made: list[ObjectRef] = []

    # ------------------------------------------------------------------------------------------------------- objects

    def name(self, word: str) -> str:
        """Return the name of something that has no namespace: a node, a queue, a rack."""
        return f"{self.namespace}-{word}"

    async def node(
        self,
        word: str,
        *,
        devices: int = 1,
        rack: str = "",
        block: str = "b",
        tags: Mapping[str, str] | None = None,
        taints: Sequence[Manifest] = (),
        cpu: str = "64",
    ) -> str:
        """Make a ready node, in a rack and block of this story's."""
        name = self.name(word)
        amounts = {self.resource: str(devices), "cpu": cpu, "memory": "256Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        near = {BLOCK: self.name(block), RACK: self.name(rack or "r")}
        manifest = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "annotations": {KWOK: "fake"},
                "labels": {"kubernetes.io/hostname": name, **near, **(tags or {})},
            },
            "spec": {"taints": list(taints)},
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
        }
        made = await self.cluster.create(manifest)
        self._made.append(ObjectRef.of(made))
        while any(taint["key"] == NOT_READY for taint in made["spec"].get("taints") or ()):
            kept = [taint for taint in made["spec"]["taints"] if taint["key"] != NOT_READY]
            made = await self.change(ObjectRef.of(made), {"spec": {"taints": kept}})
        return name

    async def silence(self, node: str) -> None:
        """Have a node's kubelet say that it is not ready, and KWOK leave it alone."""
        ref = ObjectRef(kind="Node", name=node)
        await self.change(ref, {"metadata": {"annotations": {KWOK: None}}})
        await self._say(ref, ready=False)

    async def wake(self, node: str) -> None:
        """Have a node be ready again; what Kubernetes put on it is taken off by Kubernetes."""
        ref = ObjectRef(kind="Node", name=node)
        await self._say(ref, ready=True)
        await self.change(ref, {"metadata": {"annotations": {KWOK: "fake"}}})

    async def _say(self, ref: ObjectRef, *, ready: bool) -> None:
        at = rfc3339(SystemClock().now_s())
        said = {"type": "Ready", "status": str(ready), "reason": "Test", "message": "", "lastTransitionTime": at}
        others = [entry for entry in (await self.cluster.get(ref))["status"]["conditions"] if entry["type"] != "Ready"]
        conditions = [*others, {**said, "lastHeartbeatTime": at}]
        await self.change(ref, {"status": {"conditions": conditions}}, subresource="status")

    async def nodes(self, racks: Mapping[str, int], *, devices: int = 1) -> None:
        """Make so many nodes in each rack, whose names say nothing of where they are."""
        free = [rack for rack, count in racks.items() for _ in range(count)]
        names = [f"{secrets.token_hex(3)}-{rack}" for rack in free]
        await side_by_side(
            [self.node(name, devices=devices, rack=rack) for name, rack in zip(names, free, strict=True)]
        )

    async def queue(self, word: str = "q", *, nominal: int | None = None, parent: str = "", **spec: Any) -> str:
        """Make a queue that may take so many of this story's devices."""
        quotas = spec.pop("quotas", [] if nominal is None else [{"resource": self.resource, "nominal": nominal}])
        return await self.create_queue(word, {"parent": self.name(parent) if parent else "", "quotas": quotas, **spec})

    async def create_queue(self, word: str, spec: Manifest) -> str:
        """Make a queue."""
        metadata = {"name": self.name(word)}
        kind = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_QUEUE}
        await self.create({**kind, "metadata": metadata, "spec": spec})
        return self.name(word)

    async def job(self, name: str, replicas: int = 1, **fields: Any) -> Manifest:
        """Make a job; its queue is one of this story's."""
        return await self.cluster.create(self.job_manifest(name, replicas, **fields))

    def job_manifest(
        self,
        name: str,
        replicas: int = 1,
        *,
        queue: str = "q",
        body: Mapping[str, Any] | None = None,
        workers: Mapping[str, Any] | None = None,
        namespace: str = "",
        **spec: Any,
    ) -> Manifest:
        """Return a job that is not created yet."""
        template = {"spec": {"containers": [{"name": "main", "image": "none.example/none:1"}], **(body or {})}}
        return {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_JOB,
            "metadata": {"name": name, "namespace": namespace or self.namespace},
            "spec": {
                "model": {"preset": "kimi-vl-nano"},
                "data": {"sequenceTokens": 64, "sources": [{"name": "one", "dataset": "sample/one"}]},
                "training": {"steps": 100_000, "packsPerStep": 12},
                "queueName": self.name(queue),
                "workers": {
                    "replicas": replicas,
                    "devices": 1,
                    "deviceResource": self.resource,
                    "template": template,
                    **(workers or {}),
                },
                **spec,
            },
        }

    async def create(self, manifest: Manifest) -> Manifest:
        """Create something that goes with this story."""
        made = await self.cluster.create(manifest)
        self._made.append(ObjectRef.of(made))
        return made

    async def pod(self, name: str, node: str, requests: Mapping[str, str], **metadata: Any) -> Manifest:
        """Put a foreign pod on a node."""
        resources = {"requests": dict(requests), "limits": dict(requests)}
        container = {"name": "main", "image": "none.example/none:1", "resources": resources}
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, **metadata},
            "spec": {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0},
        }
        return await self.cluster.create(manifest)

    async def daemon_set(self, name: str, node: str, requests: Mapping[str, str]) -> None:
        """Have a daemon set put its pod on a node, and wait until it is there."""
        container = {"name": "main", "image": "none.example/none:1", "resources": {"requests": dict(requests)}}
        template = {
            "metadata": {"labels": {"app": name}},
            "spec": {"nodeSelector": {"kubernetes.io/hostname": node}, "containers": [container]},
        }
        manifest = {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"selector": {"matchLabels": {"app": name}}, "template": template},
        }
        await self.apply(manifest)
        await self.kubectl("rollout", "status", f"daemonset/{name}", "--timeout=30s")

    async def change(self, ref: ObjectRef, patch: Manifest, *, subresource: str | None = None) -> Manifest:
        """Change an object that others change too."""
        while True:
            version = (await self.cluster.get(ref))["metadata"]["resourceVersion"]
            with contextlib.suppress(ConflictError):
                return await self.cluster.patch(ref, patch, resource_version=version, subresource=subresource)

    async def change_queue(self, word: str, **spec: Any) -> None:
        """Change a queue's spec."""
        await self.change(ObjectRef(kind="TrainingQueue", name=self.name(word)), {"spec": spec})

    async def delete(self, ref: ObjectRef, *, grace_s: int | None = None) -> None:
        """Delete what may be gone already."""
        with contextlib.suppress(NotFoundError):
            uid = (await self.cluster.get(ref))["metadata"]["uid"]
            await self.cluster.delete(ref, uid=uid, grace_period_s=grace_s)

    async def end(self, job: str) -> None:
        """Delete a job, and see its pods go."""
        await self.delete(self.ref(job))
        await self.until(lambda: self._is_gone(job), f"{job} and its pods are gone")

    async def _is_gone(self, job: str) -> bool:
        return not await self.pods(job)

    async def apply(self, *manifests: Manifest) -> None:
        """Have kubectl apply objects of kinds that the operator knows nothing of."""
        path = self._folder / "applied.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)}))
        await self.kubectl("apply", "-f", str(path))

    async def kubectl(self, *arguments: str) -> str:
        """Run kubectl in this story's namespace."""
        return await asyncio.to_thread(kubectl, self._kubeconfig, "-n", self.namespace, *arguments)

    async def polyreme(self, *arguments: str, kubeconfig: str = "") -> int:
        """Run a verb of the plugin in this story's namespace, and return its exit code."""
        where = ["-n", self.namespace] if arguments[0] in OF_JOBS else []
        return await asyncio.to_thread(invoke, [*arguments, *where, "--kubeconfig", kubeconfig or self._kubeconfig])

    # ------------------------------------------------------------------------------------------------------- what is

    def ref(self, job: str) -> ObjectRef:
        """Return the address of a job."""
        return ObjectRef(kind=labels.KIND_JOB, namespace=self.namespace, name=job)

    async def status(self, job: str) -> Manifest:
        """Return a job's status."""
        status: Manifest = (await self.cluster.get(self.ref(job))).get("status") or {}
        return status

    async def queue_status(self, word: str = "q") -> Manifest:
        """Return a queue's status."""
        queue = await self.cluster.get(ObjectRef(kind="TrainingQueue", name=self.name(word)))
        return queue.get("status") or {}

    async def condition(self, job: str, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition; empty where there is none."""
        return condition_of(await self.status(job), kind)

    async def pods(self, job: str) -> list[Manifest]:
        """Return a job's pods, by index; those that are being deleted too."""
        found = [pod for pod in await pods_of(self.cluster, self.namespace) if _tag(pod, labels.LABEL_JOB) == job]
        return sorted(found, key=lambda pod: int(_tag(pod, labels.LABEL_INDEX)))

    async def racks(self, job: str) -> list[str]:
        """Return the rack of each worker, read from the labels of the nodes that its pods are bound to."""
        return [await self._rack(pod["spec"]["nodeName"]) for pod in await self.pods(job)]

    async def _rack(self, node: str) -> str:
        tags = (await self.cluster.get(ObjectRef(kind="Node", name=node)))["metadata"]["labels"]
        return str(tags[RACK].removeprefix(f"{self.namespace}-"))

    async def running(self) -> set[str]:
        """Return the names of the jobs that are admitted."""
        jobs = (await self.cluster.list(labels.KIND_JOB, namespace=self.namespace)).items
        admitted = [job for job in jobs if condition_of(job.get("status") or {}, "Admitted")[0] == "True"]
        return {job["metadata"]["name"] for job in admitted}

    # -------------------------------------------------------------------------------------------------------- waiting

    async def until(
        self, holds: Callable[[], Coroutine[Any, Any, bool]], what: str, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Wait until something holds.

        Raises:
            AssertionError: If it never does; the message says how the jobs stand.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not await holds():
                    await asyncio.sleep(POLL_S)
                return
        jobs = (await self.cluster.list(labels.KIND_JOB, namespace=self.namespace)).items
        stand = "\n".join(f"{job['metadata']['name']}: {job.get('status')}" for job in jobs)
        raise AssertionError(f"never: {what}\n{stand}")

    async def until_job(self, job: str, holds: Callable[[Manifest], bool], what: str) -> Manifest:
        """Wait until something holds of a job's status, and return that status."""
        seen: list[Manifest] = []

        async def look() -> bool:
            seen[:] = [await self.status(job)]
            return holds(seen[0])

        await self.until(look, f"{job}: {what}")
        return seen[0]

    async def until_waits(self, job: str, reason: str, *words: str) -> str:
        """Wait until a job says that it waits for this reason, in a sentence with these words; return the sentence."""

        def holds(status: Manifest) -> bool:
            state, why, message = condition_of(status, "Queued")
            return (state, why) == ("True", reason) and all(word in message for word in words)

        status = await self.until_job(job, holds, f"waits, {reason} {words}")
        return condition_of(status, "Queued")[2]

    async def until_trains(self, job: str, *, attempt: int | None = None, workers: int | None = None) -> Manifest:
        """Wait until a job trains, in this attempt and with so many workers where they are named."""

        def holds(status: Manifest) -> bool:
            now = status.get("attempt") or {}
            return (
                condition_of(status, "Running")[0] == "True"
                and attempt in {None, now.get("number")}
                and workers in {None, now.get("replicas")}
            )

        return await self.until_job(job, holds, f"trains in attempt {attempt} with {workers} workers")

    async def until_running(self, jobs: set[str]) -> None:
        """Wait until exactly these jobs are admitted."""

        async def look() -> bool:
            return await self.running() == jobs

        await self.until(look, f"{sorted(jobs)} are admitted")

    async def until_queue(self, word: str, holds: Callable[[Manifest], bool], what: str) -> Manifest:
        """Wait until something holds of a queue's status, and return that status."""
        seen: list[Manifest] = []

        async def look() -> bool:
            seen[:] = [await self.queue_status(word)]
            return holds(seen[0])

        await self.until(look, f"queue {word}: {what}", patience_s=TOLD_S)
        return seen[0]

    async def stays(self, holds: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
        """See that something goes on to hold."""
        deadline_s = asyncio.get_running_loop().time() + STEADY_S
        while asyncio.get_running_loop().time() < deadline_s:
            assert await holds(), f"no longer: {what}"
            await asyncio.sleep(POLL_S)

    # ----------------------------------------------------------------------------------------------------------- end

    async def clear(self) -> None:
        """Take everything away: jobs, their pods, then nodes and queues."""
        jobs = (await self.cluster.list(labels.KIND_JOB, namespace=self.namespace)).items
        await side_by_side([self.delete(ObjectRef.of(job)) for job in jobs])
        pods = await pods_of(self.cluster, self.namespace)
        await side_by_side([self.delete(ObjectRef.of(pod), grace_s=0) for pod in pods])
        await side_by_side([self.delete(ref) for ref in self._made])


def condition_of(status: Manifest, kind: str) -> tuple[str, str, str]:
    """Return status, reason and message of a condition; empty where there is none."""
    for entry in status.get("conditions") or ():
        if entry["type"] == kind:
            return entry["status"], entry["reason"], entry.get("message", "")
    return "", "", ""


def places(status: Manifest) -> list[str]:
    """Return the node of each worker, as a job's status says."""
    return Placement.model_validate(status["attempt"]["placement"]).node_by_index()


def _tag(pod: Manifest, label: str) -> str:
    return str((pod["metadata"].get("labels") or {}).get(label, "-1"))


def play(kubeconfig: str, story: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    """Tell a story on a stage of its own, with launchers that speak."""

    async def told(namespace: str, folder: Path) -> None:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            stage = Stage(cluster, kubeconfig, namespace, folder)
            async with _speaking(stage):
                try:
                    await story(stage)
                finally:
                    await stage.clear()

    with api_client(kubeconfig) as api, new_namespace(api) as namespace, tempfile.TemporaryDirectory() as folder:
        asyncio.run(told(namespace, Path(folder)))


@contextlib.asynccontextmanager
async def _speaking(stage: Stage) -> AsyncIterator[None]:
    ended = asyncio.Event()
    launchers = asyncio.ensure_future(stage.hollow.run(ended))
    try:
        yield
    finally:
        ended.set()
        await launchers
