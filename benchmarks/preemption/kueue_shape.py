"""The cluster of Kueue's ``BenchmarkSchedulerTAS``, as objects of ours in the operator's cache.

1,000 nodes of 30 resources in blocks of 31, and 87 jobs that fill them, with the sizes and places of that benchmark. A
job of 200 workers, each half a node, may use an eighth of the nodes, and all others have a lower priority than it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from polyreme_api import labels
from polyreme_api.times import rfc3339
from polyreme_operator.cache.plan_book import plan_sizes
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.transition import admit
from polyreme_operator.scheduler import schedule
from polyreme_operator.snapshots import cluster_snapshot
from polyreme_operator.types.intents import INTENTS_KEY

NODES, GROUPS, RESOURCES, WORKERS = 1_000, 8, 30, 200
BLOCK = math.isqrt(NODES)
CPU, MEMORY_GIB = 10, 100
"""Of a node; of each other resource it has as many as CPUs."""
BLOCK_LABEL, GROUP_LABEL = "cloud.com/topology-block", "node-group"
OTHERS = tuple(f"example.com/res-{number}" for number in range(2, RESOURCES))
"""The first of them is the device resource of the jobs."""
NOW_S = 1_000_000.0
WAITS = "requested"


def cycle_ms(cache: ClusterCache) -> tuple[float, float, int]:
    """Run one scheduling cycle on a snapshot of its own [ms, ms of processor]; return also how many jobs it stops."""
    cache.nodes.snapshot().memo.clear()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    batch = schedule(cluster_snapshot(cache, now_s=NOW_S), NOW_S)
    took_s, took_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    victims = [write for write in batch.writes if write.after.attempt is not None and write.after.preemption]
    assert victims, "no job is preempted"
    return took_s * 1e3, took_cpu_s * 1e3, len(victims)


def full_cluster() -> ClusterCache:
    """Build the cluster, full of jobs, and the job that waits."""
    cache, left = ClusterCache(), [[CPU, MEMORY_GIB] for _ in range(NODES)]
    objects = [_topology(), _no_intents(), *(_node(at) for at in range(NODES))]
    places: dict[str, list[str]] = {}
    while (job := _fill(left, len(places) + 1)) is not None:
        manifest, rows = job
        places[manifest["metadata"]["name"]] = [_name(row) for row in rows]
        objects.append(manifest)
    wanted = _job(WAITS, CPU // 2, MEMORY_GIB // 2, WORKERS, len(places) + 1)
    wanted["spec"]["workers"]["template"]["spec"]["nodeSelector"] = {GROUP_LABEL: "group-1"}
    for manifest in (*objects, wanted):
        cache.put(manifest, now_s=NOW_S)
    while (request := cache.plans.next()) is not None:
        cache.take_plans(request, plan_sizes(request))
    for manifest in objects:
        if manifest["kind"] == labels.KIND_JOB:
            view = cache.job(manifest["metadata"]["uid"])
            assert view is not None
            at_s = NOW_S - 3_600.0 + 30.0 * view.priority
            status = admit(view, places[view.name], at_s).model_dump(mode="json", by_alias=True, exclude_none=True)
            metadata = {**manifest["metadata"], "resourceVersion": "2"}
            cache.put({**manifest, "metadata": metadata, "status": status}, now_s=at_s)
    return cache


def _fill(left: list[list[int]], number: int) -> tuple[dict[str, Any], list[int]] | None:
    """Place the next job on the first nodes that hold it; None when one does not fit."""
    cpu, memory_gib, workers = number % CPU + 1, number % MEMORY_GIB + 1, number * 10 % BLOCK + 1
    rows: list[int] = []
    for row, (free_cpu, free_gib) in enumerate(left):
        fits = min(free_cpu // cpu, free_gib // memory_gib, workers - len(rows))
        rows += [row] * fits
    if len(rows) < workers:
        return None
    for row in rows:
        left[row][0] -= cpu
        left[row][1] -= memory_gib
    return _job(f"job-{number}", cpu, memory_gib, workers, number), rows


def _job(name: str, each: int, memory_gib: int, workers: int, priority: int) -> dict[str, Any]:
    amounts = {"cpu": str(each), "memory": f"{memory_gib}Gi", **{resource: str(each) for resource in OTHERS[1:]}}
    container = {"name": "main", "image": "registry.example.com/any:1", "resources": {"requests": amounts}}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": rfc3339(NOW_S - 7_200.0),
        },
        "spec": {
            "priority": priority,
            "workers": {
                "replicas": workers,
                "devices": each,
                "deviceResource": OTHERS[0],
                "runtime": {"mode": "Environment"},
                "template": {"spec": {"containers": [container]}},
            },
        },
    }


def _name(row: int) -> str:
    return f"node-{(row + 1) // BLOCK}-{(row + 1) % BLOCK}"


def _node(row: int) -> dict[str, Any]:
    block = (row + 1) // BLOCK
    node_labels = {
        BLOCK_LABEL: f"b-{block}",
        GROUP_LABEL: f"group-{block % GROUPS + 1}",
        "kubernetes.io/hostname": _name(row),
    }
    amounts = {"cpu": str(CPU), "memory": f"{MEMORY_GIB}Gi", "pods": "110", **{name: str(CPU) for name in OTHERS}}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": _name(row), "labels": node_labels, "resourceVersion": "1"},
        "status": {"allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def _topology() -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "ClusterTopology",
        "metadata": {"name": "default", "uid": "topology", "resourceVersion": "1"},
        "spec": {"levels": [{"name": "block", "nodeLabel": BLOCK_LABEL}]},
    }


def _no_intents() -> dict[str, Any]:
    metadata = {"name": labels.INTENTS_NAME, "namespace": "polyreme-system", "resourceVersion": "1"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {INTENTS_KEY: "[]"}}
