"""Resident memory of the operator at 15,000 nodes and 15,000 pods, against an embedded cluster in another process.

Usage: run.py [--nodes 15000] [--pods 15000] [--runs 1]
"""

import argparse
import asyncio
import base64
import itertools
import json
import random
import resource
import secrets
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from polyreme_api import labels
from polyreme_api.progress import ProgressRecord, RankPhase
from polyreme_api.signed_progress import ProgressSigner
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, NotFoundError, ObjectRef, WatchEventType
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.record import Change
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from polyreme_operator.controller import run_operator
from polyreme_operator.settings import Settings
from polyreme_system.clock import SystemClock

BAR_MIB = 1024.0
GANGS = 30
MIB = 1 << 20
KIB = 1 << 10
BEAT_S = 5.0
SETTLE_S = 20.0
"""Time that the operator has after the last pod runs."""
LIMIT_S = 900.0
RACK_NODES = 16


def main() -> int:
    """Run and print one line of JSON; 0 when the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=15_000)
    parser.add_argument("--pods", type=int, default=15_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--part", choices=["cluster", "operator"], help=argparse.SUPPRESS)
    parser.add_argument("--at", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "cluster":
        asyncio.run(serve(options.nodes, options.pods))
        return 0
    if options.part == "operator":
        asyncio.run(operate(*options.at))
        return 0
    runs = [one_run(options.nodes, options.pods) for _ in range(options.runs)]
    middle = sorted(runs, key=lambda run: run["peak_mib"])[len(runs) // 2]
    peak_mib = statistics.median(run["peak_mib"] for run in runs)
    name = f"rss_{_thousands(options.nodes)}_nodes_{_thousands(options.pods)}_pods_mib"
    figures = {name: round(peak_mib, 1), **middle, "runs": len(runs)}
    ok = peak_mib < BAR_MIB
    bar = {"rss_15k_nodes_15k_pods_mib": BAR_MIB}
    print(json.dumps({"name": "bench-memory", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def one_run(nodes: int, pods: int) -> dict[str, float]:
    """Start a cluster and an operator, wait until every pod runs, and read the operator's memory."""
    me = [sys.executable, str(Path(__file__))]
    sizes = ["--nodes", str(nodes), "--pods", str(pods)]
    with subprocess.Popen([*me, "--part", "cluster", *sizes], stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdout is not None
        try:
            url, token = json.loads(cluster.stdout.readline())
            began_s = time.monotonic()
            at = ["--part", "operator", "--at", url, token]
            with subprocess.Popen([*me, *at], stdout=subprocess.PIPE, text=True) as operator:
                assert operator.stdout is not None
                try:
                    return follow(cluster, operator, pods, began_s)
                finally:
                    operator.kill()
        finally:
            cluster.kill()


def follow(
    cluster: "subprocess.Popen[str]", operator: "subprocess.Popen[str]", pods: int, began_s: float
) -> dict[str, float]:
    """Wait until the last pod runs and the operator has settled; return what it then holds."""
    assert cluster.stdout is not None
    assert operator.stdout is not None
    ran_s = 0.0
    for line in cluster.stdout:
        ran_s = time.monotonic() - began_s
        running = int(line)
        print(f"{ran_s:4.0f} s: {running:,} of {pods:,} pods run", file=sys.stderr)
        if running >= pods:
            break
        if ran_s > LIMIT_S:
            raise SystemExit(f"only {running} of {pods} pods ran within {LIMIT_S} s")
    settled_s = time.monotonic() + SETTLE_S
    said: dict[str, float] = {}
    for line in operator.stdout:
        said = json.loads(line)
        if time.monotonic() > settled_s:
            break
    return {**said, "all_running_s": round(ran_s, 1)}


async def operate(url: str, token: str) -> None:
    """Be the operator; say once a second what memory it holds."""
    connection = Connection(url=url, tls=None, authorization=lambda: f"Bearer {token}")
    async with KubernetesCluster(connection) as port:
        task = asyncio.ensure_future(
            run_operator(
                port,
                SystemClock(),
                settings=Settings(namespace="default", relist_s=60.0),
                rng=random.Random(1),
                entropy=secrets.token_bytes,
            )
        )
        while not task.done():
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / MIB
            words = {"peak_mib": round(peak_mib, 1), "now_mib": round(_resident_mib(), 1)}
            print(json.dumps({**words, "operator_cpu_s": round(time.process_time(), 1)}), flush=True)
            await asyncio.wait({task}, timeout=1.0)
        task.result()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


class Hollow:
    """A cluster whose pods run as soon as they are created, and whose leaders report."""

    def __init__(self, nodes: int, pods: int) -> None:
        self.running = 0
        self._fresh: list[Manifest] = []
        self._leases: set[ObjectRef] = set()
        self._signers: dict[str, ProgressSigner] = {}
        self.store = Store(
            new_uid=lambda: str(uuid.uuid4()), now_s=time.time, on_change=self._changed, history_changes=100_000
        )
        for number in range(nodes):
            self.store.create(node(number))
            self.store.create(daemon(number))
        for number in range(GANGS):
            self.store.create(gang(number, pods // GANGS + (number < pods % GANGS)))

    def _changed(self, change: Change) -> None:
        manifest = change.record.manifest
        if change.type is not WatchEventType.ADDED or labels.LABEL_JOB_UID not in (
            manifest["metadata"].get("labels") or {}
        ):
            return
        if manifest["kind"] == "Pod":
            self._fresh.append(manifest)
        elif manifest["kind"] == "Lease":
            self._leases.add(ObjectRef.of(manifest))

    async def run(self) -> None:
        """Let pods run, and leaders renew their Leases."""
        for beat in itertools.count():
            fresh, self._fresh = self._fresh, []
            for manifest in fresh:
                ready = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
                status = {"phase": "Running", "conditions": ready}
                self.store.patch(ObjectRef.of(manifest), {"status": status}, subresource=STATUS_SUBRESOURCE)
            self.running += len(fresh)
            if beat % int(BEAT_S) == 0:
                for ref in sorted(self._leases):
                    self._report(ref, step=beat)
            print(self.running, flush=True)
            await asyncio.sleep(1.0)

    def _report(self, ref: ObjectRef, *, step: int) -> None:
        try:
            lease = self.store.get(ref)
            owner = lease["metadata"]["ownerReferences"][0]["name"]
            job = self.store.get(ObjectRef(kind=labels.KIND_JOB, namespace="default", name=owner))
        except NotFoundError:
            return
        attempt = (job.get("status") or {}).get("attempt")
        if attempt is None:
            return
        whole = job["status"].get("replicas", 0) >= attempt["replicas"]
        record = ProgressRecord(
            attempt=attempt["number"],
            phase=RankPhase.TRAINING if whole else RankPhase.STARTING,
            step=step if whole else 0,
            steps=100_000,
            joined=attempt["replicas"] if whole else 0,
            released=whole,
        )
        signer = self._signer(job["metadata"])
        self.store.patch(ref, {"metadata": {"annotations": signer.annotations(record, at_s=time.time())}})

    def _signer(self, job: Manifest) -> ProgressSigner:
        uid = job["uid"]
        if uid not in self._signers:
            name = labels.job_object_name(job["name"], uid)
            secret = self.store.get(ObjectRef(kind="Secret", namespace=job["namespace"], name=name))
            self._signers[uid] = ProgressSigner(base64.b64decode(secret["data"][labels.SECRET_KEY]), uid)
        return self._signers[uid]


async def serve(nodes: int, pods: int) -> None:
    """Be the cluster until killed."""
    hollow = Hollow(nodes, pods)
    tokens = TokenTable()
    server = ApiServer(EmbeddedCluster(hollow.store), tokens=tokens)
    print(json.dumps([await server.start(), tokens.admin]), flush=True)
    await hollow.run()


def node(number: int) -> Manifest:
    """A node as kubelets describe themselves: labels, conditions, addresses, images."""
    name = f"gpu-node-{number:05d}"
    capacity = {labels.RESOURCE_DEVICE: "1", "cpu": "96", "memory": "1000Gi", "pods": "110"}
    at = "2026-01-01T00:00:00Z"
    conditions: list[dict[str, Any]] = [
        {
            "type": kind,
            "status": "False",
            "reason": f"Kubelet{kind}",
            "message": "as it should be",
            "lastTransitionTime": at,
        }
        for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    conditions.append({"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": at})
    tags = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "node.kubernetes.io/instance-type": "h200.8x",
        "topology.kubernetes.io/zone": "zone-a",
        "example.com/rack": f"rack-{number // RACK_NODES}",
    }
    images = [{"names": [f"registry.example/image-{at}@sha256:{at:064x}"], "sizeBytes": 10**9} for at in range(20)]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": tags, "annotations": {"volumes.kubernetes.io/attach": "true"}},
        "spec": {"providerID": f"example://zone-a/{name}", "podCIDR": "10.0.0.0/24"},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": conditions, "images": images},
    }


def daemon(number: int) -> Manifest:
    """A pod of others, as a daemon set has one on every node."""
    container = {
        "name": "agent",
        "image": "registry.example/agent:1",
        "resources": {"requests": {"cpu": "100m", "memory": "100Mi"}},
        "env": [{"name": f"VARIABLE_{at}", "value": "some value"} for at in range(10)],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"agent-{number:05d}", "namespace": "kube-system", "labels": {"app": "agent"}},
        "spec": {"nodeName": f"gpu-node-{number:05d}", "containers": [container]},
        "status": {"phase": "Running"},
    }


def gang(number: int, workers: int) -> Manifest:
    """A job with one worker a node."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": f"gang-{number}", "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 100_000, "packsPerStep": workers},
            "workers": {"replicas": workers},
        },
    }


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


if __name__ == "__main__":
    sys.exit(main())
