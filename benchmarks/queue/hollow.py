"""The operator with hollow workers: jobs and queues on a real API server, their pods in this process.

Prints one JSON line a second: jobs that have succeeded so far, and writes to the API server.
Usage: hollow.py KUBECONFIG NODES DEVICES
"""

import asyncio
import itertools
import json
import random
import secrets
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from polyreme_api import labels
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    ClusterPort,
    ListPage,
    Manifest,
    NotFoundError,
    ObjectRef,
    WatchEvent,
)
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.controller import run_operator
from polyreme_operator.settings import Settings
from polyreme_system.clock import SystemClock

HOLLOW = frozenset(
    {"Pod", "Node", "Service", "Secret", "ServiceAccount", "Lease", "Role", "RoleBinding", "PriorityClass"}
)
"""Kinds that live in this process; jobs, queues, intents and events go to the API server."""
RUNTIME_LABEL = "benchmark/runtime-ms"


class HalfHollow:
    """A cluster whose pods are hollow: each pod of a job runs for the time that the job's label says, and succeeds."""

    def __init__(self, real: ClusterPort) -> None:
        self._real = real
        self._store = Store(new_uid=lambda: str(uuid.uuid4()), now_s=time.time, history_changes=100_000)
        # Owners are on the API server: nothing here may be collected as an orphan.
        self.hollow = EmbeddedCluster(self._store, collect_garbage=False)
        self.ran = self.stopped = 0
        self.succeeded: set[str] = set()
        self.writes: Counter[str] = Counter()
        """Requests to the API server that write, by kind."""
        self._runtimes: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def _of(self, kind: str) -> ClusterPort:
        return self.hollow if kind in HOLLOW else self._real

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = 500, continue_: str | None = None
    ) -> ListPage:
        """List a page."""
        page = await self._of(kind).list(kind, namespace=namespace, limit=limit, continue_=continue_)
        self._note(page.items)
        return page

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Watch a kind."""
        async for event in self._of(kind).watch(kind, resource_version=resource_version, namespace=namespace):
            if kind == labels.KIND_JOB and event.type == "ADDED":
                self._note([event.object])
            yield event

    async def get(self, ref: ObjectRef) -> Manifest:
        """Read an object."""
        return await self._of(ref.kind).get(ref)

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; a pod begins to run."""
        self._count(manifest["kind"])
        created = await self._of(manifest["kind"]).create(manifest, dry_run=dry_run)
        if manifest["kind"] == "Pod" and not dry_run:
            task = asyncio.ensure_future(self._run(created))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return created

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Merge into an object."""
        self._count(ref.kind)
        result = await self._of(ref.kind).patch(
            ref, merge_patch, resource_version=resource_version, subresource=subresource
        )
        if ref.kind == labels.KIND_JOB:
            self._follow(result)
        return result

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete an object; of a pod nothing is left that would have to end."""
        if ref.kind == "Pod":
            grace_period_s = 0
        self._count(ref.kind)
        await self._of(ref.kind).delete(ref, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s)

    async def evict(self, ref: ObjectRef, *, uid: str) -> None:
        """Evict a pod."""
        await self._of(ref.kind).evict(ref, uid=uid)

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Give a pod to a node."""
        await self._of(ref.kind).bind(ref, uid=uid, node=node)

    def _count(self, kind: str) -> None:
        if kind not in HOLLOW:
            self.writes[kind] += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (error := task.exception()) is not None:
            # A hollow pod that fails by itself would look like a slow operator.
            raise SystemExit(f"a hollow pod failed: {error!r}") from error

    def _note(self, manifests: Any) -> None:
        for manifest in manifests:
            text = (manifest["metadata"].get("labels") or {}).get(RUNTIME_LABEL)
            if text is not None:
                self._runtimes[manifest["metadata"]["uid"]] = int(text) / 1000

    def _follow(self, job: Manifest) -> None:
        if (job.get("status") or {}).get("completedAt"):
            self.succeeded.add(job["metadata"]["uid"])

    async def _run(self, pod: Manifest) -> None:
        """Be the kubelet of a container that ends well after its time; one that is deleted before is gone at once."""
        ref, uid = ObjectRef.of(pod), pod["metadata"]["labels"][labels.LABEL_JOB_UID]
        try:
            await self.hollow.patch(ref, {"status": {"phase": "Running"}}, subresource=STATUS_SUBRESOURCE)
            await asyncio.sleep(self._runtimes[uid])
            await self.hollow.patch(ref, {"status": {"phase": "Succeeded"}}, subresource=STATUS_SUBRESOURCE)
        except NotFoundError:
            self.stopped += 1
            return
        self.ran += 1


async def main(kubeconfig: str, nodes: int, devices: int) -> None:
    """Run the operator until killed."""
    async with KubernetesCluster(from_kubeconfig(kubeconfig)) as real:
        port = HalfHollow(real)
        for number in range(nodes):
            await port.create(node(f"n{number}", devices))
        operator = asyncio.ensure_future(
            run_operator(
                port,
                SystemClock(),
                settings=Settings(namespace="default"),
                rng=random.Random(1),
                entropy=secrets.token_bytes,
            )
        )
        for _ in itertools.count():
            report = {
                "ran": port.ran,
                "succeeded": len(port.succeeded),
                "stopped": port.stopped,
                "writes": port.writes,
                "cpu_s": round(time.process_time(), 1),
            }
            print(json.dumps(report), flush=True)
            await asyncio.wait({operator}, timeout=1.0)
            if operator.done():
                operator.result()


def node(name: str, devices: int) -> Manifest:
    """A node that is large enough for anything."""
    capacity = {labels.RESOURCE_DEVICE: str(devices), "pods": "100000", "cpu": "100000", "memory": "1000Ti"}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
