"""A real API server for one benchmark: its audit log, KWOK's nodes, and the operator as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from polyreme_api.times import parse_rfc3339
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig
from polyreme_cluster.port import Manifest, ObjectRef
from tools.cluster.binaries import programs
from tools.cluster.cluster import down, up
from tools.cluster.servers import Servers

ROOT = Path(__file__).parents[2]
AT_ONCE = 64
"""Calls under way of a client: as many as the operator's."""
POLL_S = 0.1
LEADS_S = 90.0
READY_S = 400.0
BENCH_AGENT = "polyreme-bench"
"""User agent of the benchmark's own clients, by which the audit log knows them."""
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
AUDIT_POLICY: Manifest = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        {"level": "Request", "verbs": ["patch"], "resources": [{"group": "", "resources": ["nodes"]}]},
        {"level": "Metadata", "verbs": ["patch"], "resources": [{"group": "", "resources": ["nodes/status"]}]},
        {
            "level": "Metadata",
            "verbs": ["patch"],
            "resources": [{"group": "polyreme.dev", "resources": ["nodefaultpolicies/status"]}],
        },
        {
            "level": "Metadata",
            "verbs": ["create", "delete"],
            "resources": [{"group": "", "resources": ["pods"]}],
        },
        {"level": "Metadata", "verbs": ["patch"], "resources": [{"group": "", "resources": ["pods/status"]}]},
        {"level": "None"},
    ],
}
"""What the log holds: whole patches of nodes (taints), and of conditions and pods who wrote which and when."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One successful write, as the API server logged it."""

    verb: str
    resource: str
    """``nodes``, ``nodes/status``, ``pods``."""
    name: str
    received_s: float
    stored_s: float
    """When the answer was complete."""
    agent: str
    body: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An API server, and what lies beside it."""

    kubeconfig: str
    connection: Connection
    cluster: KubernetesCluster
    folder: Path

    @property
    def audit_log(self) -> Path:
        """File of the audit log."""
        return self.folder / "audit.log"

    def mark(self) -> int:
        """Return where the audit log ends now."""
        return self.audit_log.stat().st_size if self.audit_log.exists() else 0

    def written(self, since: int) -> list[Written]:
        """Return what was written successfully since a mark, in the log's order."""
        with self.audit_log.open("rb") as log:
            log.seek(since)
            lines = log.read().splitlines()
        return [_written(event) for line in lines if (event := json.loads(line))["responseStatus"]["code"] < 300]

    @contextlib.asynccontextmanager
    async def client(self, connections: int = AT_ONCE) -> AsyncIterator[aiohttp.ClientSession]:
        """Have a plain HTTP client."""
        headers = {**await self.connection.headers(), "User-Agent": BENCH_AGENT}
        connector = aiohttp.TCPConnector(limit=connections, ssl=self.connection.tls or True)
        async with aiohttp.ClientSession(self.connection.url, connector=connector, headers=headers) as session:
            yield session

    @contextlib.asynccontextmanager
    async def operator(self, *options: str) -> AsyncIterator[int]:
        """Run the operator's own process, and wait until it leads; yields its pid."""
        environment = {**os.environ, "KUBECONFIG": self.kubeconfig}
        command = [sys.executable, "-m", "polyreme_operator", "--namespace", "default", *options]
        path = self.folder / "operator.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        try:
            await self._until_leads()
            yield process.pid
            if process.returncode is not None:
                raise RuntimeError(f"the operator ended with {process.returncode}")
        except BaseException:
            print(path.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()

    async def _until_leads(self) -> None:
        ref = ObjectRef(kind="Lease", namespace="default", name="polyreme-operator")
        async with asyncio.timeout(LEADS_S):
            while True:
                with contextlib.suppress(Exception):
                    if (await self.cluster.get(ref))["spec"].get("holderIdentity"):
                        return
                await asyncio.sleep(POLL_S)


def in_server(measure: Callable[[Server], Coroutine[Any, Any, _Result]]) -> _Result:
    """Measure on a fresh API server with etcd (without fsync), controllers, scheduler and KWOK; then stop them."""

    async def run(kubeconfig: str, folder: Path) -> _Result:
        connection = from_kubeconfig(kubeconfig)
        async with KubernetesCluster(connection, connections_max=AT_ONCE) as cluster:
            return await measure(Server(kubeconfig=kubeconfig, connection=connection, cluster=cluster, folder=folder))

    with _folder() as folder:
        policy = folder / "audit-policy.json"
        policy.write_text(json.dumps(AUDIT_POLICY))
        options = (f"--audit-policy-file={policy}", f"--audit-log-path={folder / 'audit.log'}")
        environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        try:
            kubeconfig = up(folder / "cluster", environment, api_options=options)
            _let_pods_run(folder / "cluster")
            install(kubeconfig, sorted((ROOT / "manifests/crds").glob("*.yaml")))
            return asyncio.run(run(kubeconfig, folder))
        finally:
            down(folder / "cluster")


def _let_pods_run(folder: Path) -> None:
    """Start KWOK without its stage that ends the pods of Jobs as soon as they run."""
    stages = folder / "stages.yaml"
    kept = [stage for stage in stages.read_text().split("\n---\n") if "name: pod-complete" not in stage]
    stages.write_text("\n---\n".join(kept))
    servers = Servers(folder)
    kwok = servers.named("kwok")
    if kwok is None:
        raise RuntimeError("KWOK was not started")
    command = Path(f"/proc/{kwok.pid}/cmdline").read_text().rstrip("\0").split("\0")
    servers.kill(kwok)
    servers.start("kwok", command)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as name:
        yield Path(name)


def install(kubeconfig: str, paths: Sequence[Path]) -> None:
    """Apply definitions of kinds, and wait until they are served."""
    kubectl = [str(programs(os.environ)["kubectl"]), "--kubeconfig", kubeconfig]
    files = [word for path in paths for word in ("-f", str(path))]
    subprocess.run([*kubectl, "apply", "--server-side", *files], check=True, capture_output=True)
    wait = [*kubectl, "wait", "--for=condition=Established", *files]
    # kubectl fails at once where a definition has no condition yet.
    until_s = time.monotonic() + READY_S
    while (done := subprocess.run(wait, check=False, capture_output=True, text=True)).returncode:
        if time.monotonic() > until_s:
            raise RuntimeError(f"kinds are not served after {READY_S:.0f} s: {done.stderr[-500:]}")
        time.sleep(POLL_S)


async def create_nodes(server: Server, count: int, *, devices: int = 8, racks: int = 0) -> list[str]:
    """Create KWOK's nodes; return their names once every one is ready and has no taint.

    Args:
        server: Where.
        count: How many.
        devices: Devices of each.
        racks: Nodes of a rack (label ``example.com/rack``); 0: no racks.
    """
    names = [f"node-{at:05}" for at in range(count)]
    await side_by_side(
        [
            server.cluster.create(_node(name, devices, f"rack-{at // racks:04}" if racks else ""))
            for at, name in enumerate(names)
        ]
    )
    until_s = time.monotonic() + READY_S
    while True:
        nodes = await list_all(server, "Node")
        bare = [node for node in nodes if not (node["spec"].get("taints") or ()) and _is_ready(node)]
        if len(bare) == count:
            return names
        if time.monotonic() > until_s:
            raise RuntimeError(f"{len(bare)} of {count} nodes are ready and have no taint")
        await asyncio.sleep(1.0)


async def list_all(server: Server, kind: str, namespace: str | None = None) -> list[Manifest]:
    """List all objects of a kind."""
    found: list[Manifest] = []
    token: str | None = None
    while True:
        page = await server.cluster.list(kind, namespace=namespace, continue_=token)
        found += page.items
        if (token := page.continue_) is None:
            return found


async def side_by_side(calls: Sequence[Coroutine[Any, Any, _Result]], at_once: int = AT_ONCE) -> list[_Result]:
    """Await many calls, some at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(call: Coroutine[Any, Any, _Result]) -> _Result:
        async with gate:
            return await call

    return list(await asyncio.gather(*(one(call) for call in calls)))


async def patch(session: aiohttp.ClientSession, path: str, body: Manifest, *, kind: str = MERGE) -> Manifest:
    """Patch by a plain client."""
    async with session.patch(path, data=json.dumps(body), headers={"Content-Type": kind}) as response:
        answer: Manifest = json.loads(await response.read())
        response.raise_for_status()
        return answer


def load_average() -> float:
    """Return the machine's load over the last minute."""
    return round(os.getloadavg()[0], 1)


def _node(name: str, devices: int, rack: str) -> Manifest:
    amounts = {"polyreme.dev/device": str(devices), "cpu": "64", "memory": "256Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    tags = {"kubernetes.io/hostname": name, **({"example.com/rack": rack} if rack else {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": tags, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def _is_ready(node: Manifest) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _written(event: Manifest) -> Written:
    about = event["objectRef"]
    resource = about["resource"] + (f"/{about['subresource']}" if about.get("subresource") else "")
    return Written(
        verb=event["verb"],
        resource=resource,
        name=about.get("name") or "",
        received_s=parse_rfc3339(event["requestReceivedTimestamp"]),
        stored_s=parse_rfc3339(event["stageTimestamp"]),
        agent=event.get("userAgent", ""),
        body=event.get("requestObject") or {},
    )
