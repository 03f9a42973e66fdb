"""From a node's taint to the last replacement pod, and the restart of a whole gang beside JobSet, by the audit log.

Usage: run.py [--workers 32] [--gang 1000] [--runs 3] [--jobset PROGRAM]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.recovery import jobset
from benchmarks.shared.api_server import (
    STRATEGIC,
    Server,
    Written,
    create_nodes,
    in_server,
    list_all,
    load_average,
    patch,
)

from polyreme_api import labels
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.health.record import HEALTH

REPLACE_S, JOBSET_RATIO = 2.0, 1.0
FAULTY = (1, 2, 8)
"""Nodes that fail at once."""
DEVICES, RACK = 8, 96
"""Devices of a node, nodes of a rack."""
RACK_LABEL = "example.com/rack"
WITHIN_S = 240.0
LOOK_S = 0.5
SETTLE_S = 3.0
POLICY = ObjectRef(kind=labels.KIND_FAULT_POLICY, name="bench")


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=32, help="workers of the gang that loses nodes, one a node")
    parser.add_argument("--gang", type=int, default=1_000, help="pods of the gang that is restarted; 0: leave it out")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobset", type=Path, help="JobSet's manager, built as the README says")
    options = parser.parse_args()
    if options.jobset and not options.jobset.is_file():
        parser.error(f"--jobset {options.jobset} is no file: build it as benchmarks/recovery/README.md says")
    load = [load_average()]
    figures = in_server(lambda server: measure(server, options))
    load.append(load_average())
    figures |= {"runs": options.runs, "load_before_and_after": load}
    bar: dict[str, float] = {f"replace_{count}_s": REPLACE_S for count in FAULTY}
    ok = all(figures[name] < limit for name, limit in bar.items()) and figures["domain_kept"] == 1
    if "jobset_ratio" in figures:
        ok &= figures["jobset_ratio"] < JOBSET_RATIO
    bar |= {"domain_kept": 1, "jobset_ratio": JOBSET_RATIO}
    print(json.dumps({"name": "bench-recovery", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything on one API server."""
    await create_nodes(server, max(4 * RACK, options.gang // DEVICES + RACK), devices=DEVICES, racks=RACK)
    await server.cluster.create(_topology())
    replaced: dict[int, list[float]] = {count: [] for count in FAULTY}
    kept: list[bool] = []
    figures: dict[str, Any] = {}
    async with _operated(server):
        for run in range(options.runs):
            for count in FAULTY:
                took_s, together = await _lose(server, f"lost-{run}-{count}", options.workers, count)
                replaced[count].append(took_s)
                kept.append(together)
            print(f"  {replaced} {kept}", file=sys.stderr, flush=True)
        ours = [
            await _restart_ours(server, f"gang-{run}", options.gang) for run in range(options.runs * bool(options.gang))
        ]
    for count, times_s in replaced.items():
        figures |= {
            f"replace_{count}_s": round(statistics.median(times_s), 3),
            f"replace_{count}_all_s": _rounded(times_s),
        }
    figures["domain_kept"] = sum(kept) / len(kept)
    if ours:
        figures |= {"restart_s": round(statistics.median(ours), 2), "restart_all_s": _rounded(ours)}
    if ours and options.jobset:
        async with jobset.running(server, options.jobset):
            theirs = [await _restart_theirs(server, f"gang-{run}", options.gang) for run in range(options.runs)]
        figures |= {"jobset_restart_s": round(statistics.median(theirs), 2), "jobset_restart_all_s": _rounded(theirs)}
        figures["jobset_ratio"] = round(statistics.median(ours) / statistics.median(theirs), 3)
    return figures


@contextlib.asynccontextmanager
async def _operated(server: Server) -> AsyncIterator[None]:
    spec = {"mode": "Enforce", "classes": ["gpu-lost"], "examineSeconds": 3600, "breaker": {"nodesPercent": 100}}
    meta = {"apiVersion": labels.API_VERSION, "kind": POLICY.kind, "metadata": {"name": POLICY.name}}
    async with server.operator():
        await server.cluster.create({**meta, "spec": spec})
        await asyncio.sleep(SETTLE_S)
        yield


# ---------------------------------------------------------------------------------------------------- nodes that fail


async def _lose(server: Server, name: str, workers: int, count: int) -> tuple[float, bool]:
    """Let nodes of a running gang fail; return the time to its last replacement, and whether it lies in its rack."""
    job = await server.cluster.create(_job(name, workers, devices=DEVICES, required="rack"))
    before = await _until_running(server, name, workers)
    racks = await _racks(server)
    faulty = sorted({str(pod["spec"]["nodeName"]) for pod in before})[:count]
    await asyncio.sleep(SETTLE_S)
    mark, old = server.mark(), {pod["metadata"]["name"] for pod in before}
    async with server.client() as session:
        now = rfc3339(time.time())
        sign = {"type": "polyreme.dev/GPU", "status": "True", "reason": "Xid79", "message": "fell off the bus"}
        body = {"status": {"conditions": [{**sign, "lastHeartbeatTime": now, "lastTransitionTime": now}]}}
        await asyncio.gather(*(patch(session, f"/api/v1/nodes/{node}/status", body, kind=STRATEGIC) for node in faulty))
    after = await _until_running(server, name, workers, without=faulty)
    new = {pod["metadata"]["name"] for pod in after} - old
    written = server.written(mark)
    tainted_s = [each.stored_s for each in written if _sets_taint(each) and each.name in faulty]
    made = {each.name: each.stored_s for each in written if each.resource == "pods" and each.verb == "create"}
    took_s = max(made[each] for each in new) - min(tainted_s)
    together = len({racks[str(pod["spec"]["nodeName"])] for pod in (*before, *after)}) == 1
    await _delete(server, job)
    return took_s, together


def _sets_taint(each: Written) -> bool:
    taints = (each.body.get("spec") or {}).get("taints") or ()
    return each.resource == "nodes" and any(taint.get("key") == HEALTH for taint in taints)


async def _racks(server: Server) -> dict[str, str]:
    return {node["metadata"]["name"]: node["metadata"]["labels"][RACK_LABEL] for node in await list_all(server, "Node")}


# --------------------------------------------------------------------------------------------------- gangs that restart


async def _restart_ours(server: Server, name: str, pods: int) -> float:
    job = await server.cluster.create(_job(name, pods, devices=1))
    try:
        return await _restart(server, await _until_running(server, name, pods), name, pods)
    finally:
        await _delete(server, job)


async def _restart_theirs(server: Server, name: str, pods: int) -> float:
    async with server.client() as session:
        await jobset.create(session, name, pods)
        try:
            return await _restart(server, await _until_running(server, name, pods), name, pods)
        finally:
            await jobset.delete(session, name)
            await _until_gone(server)


async def _restart(server: Server, before: Sequence[Manifest], name: str, pods: int) -> float:
    """Fail one pod of a gang; return the time until the last pod of the next attempt runs, from the failure on."""
    old = {pod["metadata"]["uid"] for pod in before}
    victim = before[0]["metadata"]
    await asyncio.sleep(SETTLE_S)
    mark = server.mark()
    state = {"name": "main", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    status = {
        "phase": "Failed",
        "containerStatuses": [{**state, "image": "", "imageID": "", "ready": False, "restartCount": 0}],
    }
    async with server.client() as session:
        path = f"/api/v1/namespaces/{victim['namespace']}/pods/{victim['name']}/status"
        await patch(session, path, {"status": status}, kind=STRATEGIC)
        failed_s = time.time()
    await _until_running(server, name, pods, not_uids=frozenset(old))
    return max(each.stored_s for each in server.written(mark) if each.resource == "pods/status") - failed_s


# --------------------------------------------------------------------------------------------------------------- parts


async def _until_running(
    server: Server,
    name: str,
    count: int,
    *,
    without: Sequence[str] = (),
    not_uids: frozenset[str] = frozenset(),
) -> list[Manifest]:
    """Wait until all pods of a gang run, none of them on some nodes, none with some UIDs."""
    until_s = time.monotonic() + WITHIN_S
    while True:
        pods = [
            pod for pod in await list_all(server, "Pod", "default") if pod["metadata"]["name"].startswith(f"{name}-")
        ]
        good = [
            pod
            for pod in pods
            if (pod.get("status") or {}).get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
            and pod["spec"].get("nodeName") not in without
            and pod["metadata"]["uid"] not in not_uids
        ]
        if len(good) == count:
            return good
        if time.monotonic() > until_s:
            jobs = [job.get("status") for job in await list_all(server, labels.KIND_JOB, "default")]
            raise RuntimeError(f"{len(good)} of {count} pods of {name} run, {len(pods)} are there; jobs: {jobs}"[:2000])
        await asyncio.sleep(LOOK_S if count < 100 else 2.0)


async def _delete(server: Server, job: Manifest) -> None:
    await server.cluster.delete(ObjectRef.of(job), uid=job["metadata"]["uid"])
    await _until_gone(server)


async def _until_gone(server: Server) -> None:
    until_s = time.monotonic() + WITHIN_S
    while (await server.cluster.list("Pod", namespace="default", limit=1)).items:
        if time.monotonic() > until_s:
            raise RuntimeError(f"pods are left after {WITHIN_S:.0f} s")
        await asyncio.sleep(LOOK_S)


def _topology() -> Manifest:
    levels = [{"name": "rack", "nodeLabel": RACK_LABEL}]
    meta = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_TOPOLOGY, "metadata": {"name": "default"}}
    return {**meta, "spec": {"levels": levels}}


def _job(name: str, workers: int, *, devices: int, required: str = "") -> Manifest:
    container = {"name": "main", "image": "registry.example/none:1"}
    spec: dict[str, Any] = {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
        "training": {"steps": 10, "packsPerStep": workers},
        "failurePolicy": {"onNodeFault": {"action": "Now"}, "backoff": {"initialSeconds": 0, "maxSeconds": 1}},
        "workers": {
            "replicas": workers,
            "devices": devices,
            "deviceResource": labels.RESOURCE_DEVICE,
            "runtime": {"mode": "Environment"},
            "template": {"spec": {"containers": [container]}},
            **({"topology": {"required": required}} if required else {}),
        },
    }
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB, "metadata": metadata, "spec": spec}


def _rounded(times_s: Sequence[float]) -> list[float]:
    return [round(each, 3) for each in times_s]


if __name__ == "__main__":
    sys.exit(main())
