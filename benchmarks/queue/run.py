"""Kueue's baseline shape: 15,000 small jobs in 30 queues of 5 cohorts, through a real API server, no pods created.

Usage: run.py [--jobs 15000] [--runs 1] [--kueue CHECKOUT]
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.shared import kueue

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import Manifest
from tools.cluster.binaries import programs

ROOT = Path(__file__).parents[2]
BAR_S = 300.0
KUEUE_JOBS = 15_000
COHORTS, QUEUES = 5, 6
CLASSES = (("small", 350, 1, 200, 50), ("medium", 100, 5, 500, 100), ("large", 50, 20, 1000, 200))
"""Name, jobs of each 500, devices, runtime [ms], priority."""
NOMINAL, BORROW = 20, 100
CREATES_AT_ONCE = 32
NODES, NODE_DEVICES = 4, 1000
LIMIT_S = 560.0


def main() -> int:
    """Run and print one line of JSON; 0 when the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=15_000)
    parser.add_argument("--runs", type=int, default=1)
    kueue.add_option(parser)
    options = parser.parse_args()
    runs, theirs = [], []
    for _ in range(options.runs):
        runs.append(one_run(options.jobs))
        if options.kueue:
            theirs.append(kueue.run_baseline(options.kueue))
    walls_s = [run["wall_s"] for run in runs]
    middle = sorted(runs, key=lambda run: run["wall_s"])[len(runs) // 2]
    figures = {f"baseline_{_thousands(options.jobs)}_jobs_s": round(statistics.median(walls_s), 1), **middle}
    figures["runs"] = len(runs)
    if theirs:
        figures |= sorted(theirs, key=lambda run: run["kueue_s"])[len(theirs) // 2]
        figures["kueue_version"] = kueue.version(options.kueue)
        if options.jobs == KUEUE_JOBS:
            figures["ratio_to_kueue"] = round(statistics.median(walls_s) / figures["kueue_s"], 3)
    ok = options.jobs < 15_000 or statistics.median(walls_s) < BAR_S
    bar = {"baseline_15k_jobs_s": BAR_S}
    print(json.dumps({"name": "bench-queue", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def one_run(jobs: int) -> dict[str, Any]:
    """Bring up a cluster, push the jobs through, take it down."""
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as folder:
        cluster = [sys.executable, "-m", "tools.cluster", "--folder", f"{folder}/cluster"]
        environment = {"PYTHONPATH": str(ROOT)}
        kubeconfig = subprocess.run(
            [*cluster, "up"], check=True, capture_output=True, text=True, cwd=ROOT, env=_environment(environment)
        ).stdout.strip()
        try:
            install(kubeconfig)
            end_servers(Path(folder) / "cluster")
            return asyncio.run(push(kubeconfig, jobs))
        finally:
            subprocess.run([*cluster, "down"], check=False, cwd=ROOT, env=_environment(environment))


def install(kubeconfig: str) -> None:
    """Apply our CRDs and wait until they are served."""
    command = [kubectl(), "--kubeconfig", kubeconfig]
    crds = [word for path in sorted((ROOT / "manifests/crds").glob("*.yaml")) for word in ("-f", str(path))]
    subprocess.run([*command, "apply", *crds], check=True, capture_output=True)
    subprocess.run([*command, "wait", "--for=condition=Established", *crds], check=True, capture_output=True)


def end_servers(folder: Path) -> None:
    """End what Kueue's runner does not have either; the garbage collector would watch every job."""
    for server in json.loads((folder / "state.json").read_text())["servers"]:
        if server["name"] in {"kube-controller-manager", "kube-scheduler", "kwok"}:
            os.kill(server["pid"], signal.SIGKILL)


async def push(kubeconfig: str, jobs: int) -> dict[str, Any]:
    """Create queues and jobs, wait for the last, and read what came of them."""
    async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
        for manifest in queues():
            await cluster.create(manifest)
        operator = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("hollow.py")),
            kubeconfig,
            str(NODES),
            str(NODE_DEVICES),
            stdout=subprocess.PIPE,
            limit=1 << 20,
        )
        try:
            started_s = time.monotonic()
            created = asyncio.ensure_future(create_all(cluster, jobs))
            done = asyncio.ensure_future(until_done(operator, jobs, started_s))
            await asyncio.wait({created, done}, return_when=asyncio.FIRST_COMPLETED)
            create_s = await created
            last = await done
            wall_s = time.monotonic() - started_s
        finally:
            operator.kill()
            await operator.wait()
        return {
            "wall_s": round(wall_s, 1),
            "create_s": round(create_s, 1),
            "jobs_per_s": round(jobs / wall_s, 1),
            "operator_cpu_s": last["cpu_s"],
            "operator_cpu_per_job_ms": round(last["cpu_s"] * 1000 / jobs, 1),
            "writes_per_job": round(sum(last["writes"].values()) / jobs, 2),
            "status_writes_per_job": round(last["writes"].get(labels.KIND_JOB, 0) / jobs, 2),
            "preempted": last["stopped"],
            **await admission_times(cluster, jobs),
        }


async def until_done(operator: asyncio.subprocess.Process, jobs: int, started_s: float) -> dict[str, Any]:
    """Follow the operator until every job's status says that it succeeded."""
    assert operator.stdout is not None
    printed_s = 0.0
    async for line in operator.stdout:
        last: dict[str, Any] = json.loads(line)
        elapsed_s = time.monotonic() - started_s
        if elapsed_s - printed_s >= 10:
            printed_s = elapsed_s
            print(
                f"{elapsed_s:4.0f} s: {last['succeeded']:,} of {jobs:,} jobs have succeeded, "
                f"{last['stopped']:,} preempted, operator used {last['cpu_s']} s",
                file=sys.stderr,
            )
        if last["succeeded"] >= jobs:
            return last
        if elapsed_s > LIMIT_S:
            raise SystemExit(f"only {last['succeeded']} of {jobs} jobs succeeded within {LIMIT_S} s")
    raise SystemExit("the operator ended; its words stand above")


async def create_all(cluster: KubernetesCluster, jobs: int) -> float:
    """Create every job, as fast as the API server takes them; return how long that took."""
    started_s = time.monotonic()
    gate = asyncio.Semaphore(CREATES_AT_ONCE)

    async def create(manifest: Manifest) -> None:
        async with gate:
            await cluster.create(manifest)

    await asyncio.gather(*(create(manifest) for manifest in manifests(jobs)))
    return time.monotonic() - started_s


def queues() -> list[Manifest]:
    """Five cohorts of six queues."""
    found = []
    for cohort in range(COHORTS):
        found.append(_queue(f"cohort-{cohort}", "", []))
        for number in range(QUEUES):
            quota = {"resource": labels.RESOURCE_DEVICE, "nominal": NOMINAL, "borrowingLimit": BORROW}
            found.append(_queue(f"queue-{cohort}-{number}", f"cohort-{cohort}", [quota]))
    return found


def manifests(jobs: int) -> list[Manifest]:
    """The jobs, spread over the queues, classes mixed as Kueue's generator mixes them."""
    pattern = [entry for entry in CLASSES for _ in range(entry[1] // 50)]
    names = [f"queue-{cohort}-{number}" for cohort in range(COHORTS) for number in range(QUEUES)]
    found = []
    for number in range(jobs):
        name, _, devices, runtime_ms, priority = pattern[(number // len(names)) % len(pattern)]
        container = {"name": "main", "image": "registry.example.com/any:1", "command": ["sleep"]}
        spec = {
            "queueName": names[number % len(names)],
            "priority": priority,
            "workers": {
                "replicas": 1,
                "devices": devices,
                "runtime": {"mode": "Environment"},
                "template": {"spec": {"containers": [container]}},
            },
        }
        metadata = {
            "name": f"{name}-{number}",
            "namespace": "default",
            "labels": {"benchmark/runtime-ms": str(runtime_ms)},
        }
        found.append({"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB, "metadata": metadata, "spec": spec})
    return found


async def admission_times(cluster: KubernetesCluster, jobs: int) -> dict[str, Any]:
    """Read every job: all have succeeded, and how long each class waited on average."""
    waits: dict[str, list[float]] = defaultdict(list)
    outcomes: Counter[str] = Counter()
    for _ in range(60):
        waits.clear()
        outcomes.clear()
        token = None
        while True:
            page = await cluster.list(labels.KIND_JOB, continue_=token)
            for item in page.items:
                status = item.get("status") or {}
                kinds = {entry["type"] for entry in status.get("conditions") or () if entry["status"] == "True"}
                outcomes["Succeeded" if "Succeeded" in kinds else "other"] += 1
                if status.get("firstAdmittedAt"):
                    created_s = parse_rfc3339(item["metadata"]["creationTimestamp"])
                    waits[item["metadata"]["name"].split("-")[0]].append(
                        parse_rfc3339(status["firstAdmittedAt"]) - created_s
                    )
            token = page.continue_
            if token is None:
                break
        if outcomes["Succeeded"] == jobs:
            break
        await asyncio.sleep(1)
    assert outcomes["Succeeded"] == jobs, outcomes
    return {f"admission_{name}_s": round(statistics.mean(values), 1) for name, values in sorted(waits.items())}


def kubectl() -> str:
    """The kubectl that came with the servers."""
    return str(programs(os.environ)["kubectl"])


def _queue(name: str, parent: str, quotas: list[dict[str, Any]]) -> Manifest:
    spec: dict[str, Any] = {"quotas": quotas}
    if parent:
        spec["parent"] = parent
    return {"apiVersion": labels.API_VERSION, "kind": "TrainingQueue", "metadata": {"name": name}, "spec": spec}


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **more}


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


if __name__ == "__main__":
    sys.exit(main())
