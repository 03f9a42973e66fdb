"""One gang of pods, from the job's creation until every pod is bound: our gang binder and kube-scheduler, side by side.

Usage: run.py [--pods 5000] [--nodes 2000] [--runs 1]
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from polyreme_api import labels
from polyreme_api.errors import RetryableError
from polyreme_cluster.adapters.kubernetes.cluster import CONNECTIONS_MAX, KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig
from polyreme_cluster.port import Manifest, ObjectRef, WatchEventType
from polyreme_operator.cache.kinds import WATCHED_KINDS
from polyreme_operator.cache.plan_book import planned
from polyreme_operator.reconcile.binding import BindingMode
from polyreme_operator.reconcile.transition import admit
from polyreme_operator.reconcile.worker_pods import PodDefaults, WorkerPods
from polyreme_operator.types.parse import parse_job_view

ROOT = Path(__file__).parents[2]
RATIO_MAX, CREATE_RATIO_MIN = 0.5, 0.8
DEVICES = 8
AT_ONCE = CONNECTIONS_MAX
"""Calls under way: of the plain client as of the operator."""
RESOURCE = labels.RESOURCE_DEVICE
OWNED = "polyreme.dev/owned"
NOT_READY = "node.kubernetes.io/not-ready"
LIMIT_S = 400.0
_HEAD = re.compile(
    rb'\{"type":"(?P<type>[A-Z]+)","object":\{"kind":"Pod","apiVersion":"v1","metadata":\{"name":"(?P<name>[^"]+)",'
    rb'.*?"resourceVersion":"(?P<version>[0-9]+)"'
)
POLL_S = 0.1
_AS_STORED = {"uid": "0b1c2d3e-0000-4000-8000-000000000001", "resourceVersion": "1", "generation": 1}


@dataclass(slots=True)
class Seen:
    """What a watch of pods has shown, in seconds since the start."""

    started_s: float = field(default_factory=time.monotonic)
    created: dict[str, float] = field(default_factory=dict)
    bound: dict[str, float] = field(default_factory=dict)
    watches: list[asyncio.Future[None]] = field(default_factory=list)

    def note(self, line: bytes) -> str:
        """Take one event of a pod; return its version. Its head alone is parsed: the names come first in a pod."""
        head = _HEAD.match(line)
        if head is None:
            raise RuntimeError(f"a watch of pods said {line[:300]!r}")
        name, now_s = head["name"].decode(), time.monotonic() - self.started_s
        if head["type"] != WatchEventType.DELETED.encode():
            self.created.setdefault(name, now_s)
            if b'"nodeName":"' in line:
                self.bound.setdefault(name, now_s)
        return head["version"].decode()

    async def until(self, what: dict[str, float], count: int) -> float:
        """Wait until so many have come; return when the last did."""
        async with asyncio.timeout(LIMIT_S):
            while len(what) < count:
                await asyncio.sleep(POLL_S)
                for watch in self.watches:
                    if watch.done():
                        watch.result()
        return max(what.values())


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=5_000)
    parser.add_argument("--nodes", type=int, default=0, help="0: as many as the pods need, an eighth and a bit")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    nodes = options.nodes or min(2_000, options.pods // DEVICES + 125)
    runs = [one_run(options.pods, nodes) for _ in range(options.runs)]
    figures = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    figures |= {"pods": options.pods, "nodes": nodes, "runs": options.runs}
    ok = figures["ratio_to_kube_scheduler"] <= RATIO_MAX and figures["create_ratio_to_raw"] >= CREATE_RATIO_MIN
    bar = {"ratio_to_kube_scheduler": RATIO_MAX, "create_ratio_to_raw": CREATE_RATIO_MIN}
    print(json.dumps({"name": "bench-launch", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def one_run(pods: int, nodes: int) -> dict[str, float]:
    """Measure each in a cluster of its own, so that none inherits what another left."""
    gang = _in_cluster(lambda place: by_operator(place, pods, "GangBinder"), nodes, owned=True)
    alone = _in_cluster(lambda place: by_operator(place, pods, "NodeAffinity"), nodes, without=("kube-scheduler",))
    raw = _in_cluster(lambda place: by_hand(place, pods, "NodeAffinity"), nodes, without=("kube-scheduler",))
    peer = _in_cluster(lambda place: by_hand(place, pods, None), nodes)
    return {
        "gang_all_bound_s": gang["bound_s"],
        "gang_bound_p50_s": gang["bound_p50_s"],
        **{f"gang_{name}": took for name, took in gang.items() if name.endswith("_cpu_ms_per_pod")},
        "kube_scheduler_all_bound_s": peer["bound_s"],
        "kube_scheduler_bound_p50_s": peer["bound_p50_s"],
        "ratio_to_kube_scheduler": gang["bound_s"] / peer["bound_s"],
        "operator_creates_s": alone["created_s"],
        "raw_creates_s": raw["created_s"],
        "create_ratio_to_raw": raw["created_s"] / alone["created_s"],
    }


@dataclass(frozen=True, slots=True)
class Place:
    """A cluster, and a client of it."""

    kubeconfig: str
    cluster: KubernetesCluster
    connection: Connection
    folder: Path


def _in_cluster(
    measure: Callable[[Place], Coroutine[Any, Any, dict[str, float]]],
    nodes: int,
    *,
    owned: bool = False,
    without: tuple[str, ...] = (),
) -> dict[str, float]:
    async def prepared(kubeconfig: str, folder: Path) -> dict[str, float]:
        connection = from_kubeconfig(kubeconfig)
        async with KubernetesCluster(connection, connections_max=AT_ONCE) as cluster:
            await _side_by_side([_node(cluster, f"node-{at:05}", owned=owned) for at in range(nodes)])
            return await measure(Place(kubeconfig, cluster, connection, folder))

    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tools.cluster", "--folder", str(folder / "cluster")]
        environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        environment["PYTHONPATH"] = str(ROOT)
        up = subprocess.run([*command, "up"], check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
        try:
            kubeconfig = up.stdout.strip()
            _install(kubeconfig)
            # The controllers would treat nodes without heartbeats as lost, and KWOK has nothing to do.
            _end_servers(folder / "cluster", ("kube-controller-manager", "kwok", *without))
            measured = asyncio.run(prepared(kubeconfig, folder))
            print(f"  {measured}", file=sys.stderr, flush=True)
            return measured
        finally:
            subprocess.run([*command, "down"], check=False, cwd=ROOT, env=environment, capture_output=True)


async def by_operator(place: Place, pods: int, mode: str) -> dict[str, float]:
    """Let the operator's own process launch one gang."""
    environment = {**os.environ, "KUBECONFIG": place.kubeconfig}
    command = [sys.executable, "-m", "polyreme_operator", "--binding", mode, "--namespace", "default"]
    with (place.folder / "operator.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    try:
        await _until_leads(place.cluster)
        async with _watching(place.connection) as seen:
            before_s = _used_s(place, operator=process.pid)
            await place.cluster.create(_job(pods))
            figures = await _figures(seen, pods, bound=mode == "GangBinder")
            return figures | _costs(before_s, _used_s(place, operator=process.pid), pods)
    except BaseException:
        print((place.folder / "operator.log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        await process.wait()


async def by_hand(place: Place, pods: int, mode: BindingMode | None) -> dict[str, float]:
    """Create the very pods that the operator would, by a plain client that holds the operator's watches.

    Args:
        place: Where.
        pods: How many.
        mode: As the operator would have them bound; None leaves them to kube-scheduler, held to no node.
    """
    connector = aiohttp.TCPConnector(limit=AT_ONCE, ssl=place.connection.tls or True)
    headers = {**await place.connection.headers(), "Content-Type": "application/json"}
    url = f"{place.connection.url}/api/v1/namespaces/default/pods"
    bodies = (json.dumps(pod) for pod in _pods(pods, mode))
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        _followed(place.cluster),
        _watching(place.connection) as seen,
    ):
        before_s = _used_s(place)

        async def create() -> None:
            for body in bodies:
                async with session.post(url, data=body) as response:
                    json.loads(await response.read())
                    response.raise_for_status()

        await asyncio.gather(*(create() for _ in range(AT_ONCE)))
        figures = await _figures(seen, pods, bound=mode is None)
        return figures | _costs(before_s, _used_s(place), pods)


async def _figures(seen: Seen, pods: int, *, bound: bool) -> dict[str, float]:
    last_created_s = await seen.until(seen.created, pods)
    figures = {"created_s": last_created_s - min(seen.created.values())}
    if bound:
        figures["bound_s"] = await seen.until(seen.bound, pods)
        figures["bound_p50_s"] = statistics.median(seen.bound[name] - seen.created[name] for name in seen.bound)
    return figures


def _used_s(place: Place, **others: int) -> dict[str, float]:
    """Return the processor time that this process, the cluster's servers and others (by pid) have used."""
    state = json.loads((place.folder / "cluster/state.json").read_text())
    pids = {server["name"]: server["pid"] for server in state["servers"]} | others | {"benchmark": os.getpid()}
    used_s = {}
    for name, pid in pids.items():
        # Servers that were ended are gone.
        with contextlib.suppress(FileNotFoundError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used_s[name.replace("-", "_")] = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return used_s


def _costs(before_s: dict[str, float], after_s: dict[str, float], pods: int) -> dict[str, float]:
    return {f"{name}_cpu_ms_per_pod": 1e3 * (used_s - before_s[name]) / pods for name, used_s in after_s.items()}


@contextlib.asynccontextmanager
async def _followed(cluster: KubernetesCluster) -> AsyncIterator[None]:
    """Hold the operator's watches through the operator's own adapter, which parses what they say."""

    async def follow(kind: str) -> None:
        version = (await cluster.list(kind, limit=1)).resource_version
        while True:
            try:
                async for event in cluster.watch(kind, resource_version=version):
                    version = event.resource_version
            except RetryableError:
                # Kinds whose definitions are new are not served at once.
                await asyncio.sleep(POLL_S)

    tasks = [asyncio.ensure_future(follow(kind)) for kind in WATCHED_KINDS]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _watching(connection: Connection) -> AsyncIterator[Seen]:
    """Look at every pod by a watch of its own, the same for all that are measured; it parses no more than it needs."""
    seen = Seen()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=connection.tls or True),
        headers=await connection.headers(),
        read_bufsize=4 << 20,
    ) as session:

        async def watch() -> None:
            version = ""
            while True:
                # The server ends watches that can't keep up with a burst: they resume, as every client does.
                url = f"{connection.url}/api/v1/pods?watch=1&resourceVersion={version}"
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as response:
                    response.raise_for_status()
                    async for line in response.content:
                        version = seen.note(line)

        seen.watches = [asyncio.ensure_future(watch())]
        await asyncio.sleep(1.0)
        seen.started_s = time.monotonic()
        try:
            yield seen
        finally:
            for task in seen.watches:
                task.cancel()
            await asyncio.gather(*seen.watches, return_exceptions=True)


def _install(kubeconfig: str) -> None:
    paths = sorted((ROOT / "manifests/crds").glob("*.yaml"))
    files = [word for path in paths for word in ("-f", str(path))]
    for verb in (("apply",), ("wait", "--for=condition=Established")):
        subprocess.run([_kubectl(), "--kubeconfig", kubeconfig, *verb, *files], check=True, capture_output=True)


def _kubectl() -> str:
    sys.path.insert(0, str(ROOT))
    from tools.cluster.binaries import programs

    return str(programs(os.environ)["kubectl"])


def _end_servers(folder: Path, names: tuple[str, ...]) -> None:
    for server in json.loads((folder / "state.json").read_text())["servers"]:
        if server["name"] in names:
            os.kill(server["pid"], signal.SIGKILL)


async def _until_leads(cluster: KubernetesCluster) -> None:
    ref = ObjectRef(kind="Lease", namespace="default", name="polyreme-operator")
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(Exception):
                if (await cluster.get(ref))["spec"].get("holderIdentity"):
                    break
            await asyncio.sleep(POLL_S)
    # The model of the cluster is read meanwhile.
    await asyncio.sleep(5.0)


async def _node(cluster: KubernetesCluster, name: str, *, owned: bool) -> None:
    amounts = {RESOURCE: str(DEVICES), "cpu": "64", "memory": "256Gi", "pods": "110"}
    taints = [{"key": OWNED, "effect": "NoSchedule"}] if owned else []
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    await cluster.create(
        {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": taints}, "status": status}
    )
    # Admission taints every new node as not ready, and no controller is there to remove the taint.
    await cluster.patch(ObjectRef(kind="Node", name=name), {"spec": {"taints": taints}})


async def _side_by_side(calls: list[Coroutine[Any, Any, None]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await call

    await asyncio.gather(*(one(call) for call in calls))


def _job(pods: int) -> Manifest:
    container = {"name": "main", "image": "registry.example/none:1"}
    workers = {"replicas": pods, "devices": 1, "deviceResource": RESOURCE, "runtime": {"mode": "Environment"}}
    spec = {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
        "training": {"steps": 10, "packsPerStep": pods},
        "workers": {**workers, "template": {"spec": {"containers": [container]}}},
    }
    metadata = {"name": "gang", "namespace": "default"}
    return {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB, "metadata": metadata, "spec": spec}


def _pods(count: int, mode: BindingMode | None) -> Iterator[Manifest]:
    """Yield the pods that the operator makes of the job; without a mode, as a user's that name no node."""
    job = planned(parse_job_view(_job(count) | {"metadata": {"name": "gang", "namespace": "default", **_AS_STORED}}))
    if job.spec is None or job.plan is None:
        raise RuntimeError(f"the benchmark's job is no job: {job.invalid}")
    nodes = [f"node-{index // DEVICES:05}" for index in range(count)]
    attempt = admit(job, nodes, 0.0, plan=job.plan).attempt
    if attempt is None:
        raise RuntimeError("an admitted job has an attempt")
    pods = WorkerPods(job, job.spec, attempt, defaults=PodDefaults(), mode=mode or "NodeAffinity")
    for index, node in enumerate(nodes):
        manifest = pods.manifest(index=index, node=node)
        if mode is None:
            manifest["spec"] = {key: each for key, each in manifest["spec"].items() if key != "affinity"}
        yield manifest


if __name__ == "__main__":
    sys.exit(main())
