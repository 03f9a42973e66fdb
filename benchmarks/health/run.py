"""From a node's condition to its stored taint, by the audit log's clock: 200 nodes at once, 750, and the breaker.

Usage: run.py [--nodes 1500] [--burst 200] [--many 750] [--runs 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.shared.api_server import (
    AT_ONCE,
    BENCH_AGENT,
    STRATEGIC,
    Server,
    Written,
    create_nodes,
    in_server,
    list_all,
    load_average,
    patch,
    side_by_side,
)

from polyreme_api import labels
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.health.breaker import limit_of
from polyreme_operator.health.record import HEALTH

BURST_P99_MS, MANY_S, RAW_RATIO = 1_000.0, 15.0, 1.5
WITHIN_S = 180.0
SETTLE_S = 3.0
LOOK_S = 1.0
"""How often the log is read: seldom, since it takes from the same cores."""
CONFLICT, TRIES_MAX = 409, 10
STEPS = 25
"""Nodes that fail at a time when the breaker is measured."""
PERCENT = 10
SIGN = {"type": "polyreme.dev/GPU", "status": "True", "reason": "Xid79", "message": "GPU has fallen off the bus"}
POLICY = ObjectRef(kind=labels.KIND_FAULT_POLICY, name="bench")


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_500)
    parser.add_argument("--burst", type=int, default=200)
    parser.add_argument("--many", type=int, default=750)
    parser.add_argument("--runs", type=int, default=3, help="bursts, and pairs of ours and the plain client's")
    parser.add_argument("--spy", type=Path, help="py-spy: profile the operator during the 750 into build/operator.svg")
    options = parser.parse_args()
    load = [load_average()]
    figures = in_server(lambda server: measure(server, options))
    load.append(load_average())
    figures |= {"nodes": options.nodes, "runs": options.runs, "load_before_and_after": load}
    bar = {
        "burst_200_taint_p99_ms": BURST_P99_MS,
        "taint_750_s": MANY_S,
        "raw_ratio": RAW_RATIO,
        "breaker_overshoot": 0,
    }
    ok = all(figures[name] <= limit for name, limit in bar.items())
    print(json.dumps({"name": "bench-health", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


async def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything on one API server."""
    names = await create_nodes(server, options.nodes)
    bursts, ours, plain = [], [], []
    for _ in range(options.runs):
        async with _operated(server, percent=100):
            bursts.append(await _fail(server, names[: options.burst]))
        await _reset(server, names)
        async with _operated(server, percent=100) as pid, _profiled(options.spy, pid):
            ours.append(await _fail(server, names[: options.many]))
        await _reset(server, names)
        async with _plain_client(server):
            plain.append(await _fail(server, names[: options.many]))
        await _reset(server, names)
    async with _operated(server, percent=PERCENT):
        overshoot, most, limit = await _overshoot(server, names)
    pairs = [mine["wall_s"] / theirs["wall_s"] for mine, theirs in zip(ours, plain, strict=True)]
    return {
        "burst_200_taint_p50_ms": round(statistics.median(each["p50_ms"] for each in bursts)),
        "burst_200_taint_p99_ms": round(statistics.median(each["p99_ms"] for each in bursts)),
        "burst_200_all_p99_ms": [round(each["p99_ms"]) for each in bursts],
        "taint_750_s": round(statistics.median(each["wall_s"] for each in ours), 2),
        "plain_750_s": round(statistics.median(each["wall_s"] for each in plain), 2),
        "conditions_750_s": round(statistics.median(each["conditions_s"] for each in ours), 2),
        "raw_ratio": round(statistics.median(pairs), 3),
        "raw_ratios": [round(each, 3) for each in pairs],
        "breaker_overshoot": overshoot,
        "breaker_out": most,
        "breaker_limit": limit,
    }


# ------------------------------------------------------------------------------------------------------ who taints


@contextlib.asynccontextmanager
async def _operated(server: Server, *, percent: int) -> AsyncIterator[int]:
    """Have the operator, and a policy that it has read."""
    spec = {"mode": "Enforce", "classes": ["gpu-lost"], "examineSeconds": 3600, "breaker": {"nodesPercent": percent}}
    manifest = {"apiVersion": labels.API_VERSION, "kind": POLICY.kind, "metadata": {"name": POLICY.name}, "spec": spec}
    async with server.operator() as pid:
        made = await server.cluster.create(manifest)
        try:
            nodes = len(await list_all(server, "Node"))
            await _until(lambda: _selected(server), nodes)
            await asyncio.sleep(SETTLE_S)
            yield pid
        finally:
            await server.cluster.delete(POLICY, uid=made["metadata"]["uid"])


async def _selected(server: Server) -> int:
    return int(((await server.cluster.get(POLICY)).get("status") or {}).get("nodes") or 0)


@contextlib.asynccontextmanager
async def _plain_client(server: Server) -> AsyncIterator[None]:
    """Have a client that watches nodes, and writes the operator's patch for each that shows the condition.

    It decides nothing, charges nothing and keeps nothing; it has as many connections as the operator, sends the same
    patch (taint, label and a record of the same size, bound to the version that it saw), reads a node again where that
    version is old, and reads the same watch.
    """
    async with server.client() as writes, server.client() as watches:
        version = (await server.cluster.list("Node", limit=1)).resource_version
        gate, tasks, seen = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]](), set[str]()

        async def taint(node: Manifest) -> None:
            path = f"/api/v1/nodes/{node['metadata']['name']}"
            async with gate:
                for _ in range(TRIES_MAX):
                    try:
                        await patch(writes, path, _plain_patch(node))
                        return
                    except aiohttp.ClientResponseError as error:
                        if error.status != CONFLICT:
                            raise
                    async with writes.get(path) as response:
                        node = json.loads(await response.read())

        def take(node: Manifest) -> None:
            name = node["metadata"]["name"]
            shows = any(each["type"] == SIGN["type"] for each in node["status"].get("conditions") or ())
            if shows and name not in seen:
                seen.add(name)
                task = asyncio.create_task(taint(node))
                tasks.add(task)

        async def follow() -> None:
            since = version
            while True:
                # The server ends watches that can't keep up with a burst: they resume, as every client does.
                path = f"/api/v1/nodes?watch=1&resourceVersion={since}"
                async with watches.get(path, timeout=aiohttp.ClientTimeout(total=None)) as response:
                    response.raise_for_status()
                    while line := await response.content.readline():
                        node = json.loads(line)["object"]
                        since = node["metadata"]["resourceVersion"]
                        take(node)

        following = asyncio.create_task(follow())
        await asyncio.sleep(SETTLE_S)
        try:
            yield
        finally:
            for task in (following, *tasks):
                if task.done():
                    task.result()
                task.cancel()
            await asyncio.gather(following, *tasks, return_exceptions=True)


def _plain_patch(node: Manifest) -> Manifest:
    now = rfc3339(time.time())
    record = {
        "version": 1,
        "state": "repairing",
        "owner": "policy/bench",
        "faultClass": "gpu-lost",
        "reason": SIGN["reason"],
        "action": "Reboot",
        "leave": "Drain",
        "condition": SIGN["type"],
        "evidence": SIGN["message"],
        "sinceS": now,
        "examineAtS": now,
        "risk": 0.75,
        "score": 2.0,
        "scoreAtS": time.time(),
        "fatalS": {"": [time.time()]},
        "seen": {SIGN["reason"]: {"atS": time.time(), "count": 1}},
    }
    metadata = {
        "resourceVersion": node["metadata"]["resourceVersion"],
        "labels": {HEALTH: "repairing"},
        "annotations": {HEALTH: json.dumps(record, separators=(",", ":"))},
    }
    taints = [*(node["spec"].get("taints") or ()), {"key": HEALTH, "value": "gpu-lost", "effect": "NoSchedule"}]
    return {"metadata": metadata, "spec": {"taints": taints}}


@contextlib.asynccontextmanager
async def _profiled(spy: Path | None, pid: int) -> AsyncIterator[None]:
    if spy is None:
        yield
        return
    command = [
        str(spy),
        "record",
        "--pid",
        str(pid),
        "--output",
        "build/operator.svg",
        "--rate",
        "200",
        "--duration",
        "600",
    ]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield
    finally:
        process.send_signal(2)
        await process.wait()


# ------------------------------------------------------------------------------------------------------ what happens


async def _fail(server: Server, names: Sequence[str]) -> dict[str, float]:
    """Let nodes fail at once; return how long the taints took, by the audit log's clock."""
    async with server.client(connections=len(names)) as session:
        # An agent's connection is open, since its heartbeats use it.
        await asyncio.gather(*(_connect(session) for _ in names))
        mark = server.mark()
        await asyncio.gather(*(_show(session, name) for name in names))
        await _until(lambda: _tainted(server, mark), len(names))
    written = server.written(mark)
    shown = {each.name: each for each in written if _is_sign(each)}
    stored = _taints(written)
    delays_ms = sorted((stored[name].stored_s - shown[name].received_s) * 1e3 for name in names)
    began_s = min(each.received_s for each in shown.values())
    figures = {
        "p50_ms": statistics.median(delays_ms),
        "p99_ms": delays_ms[-1 - len(delays_ms) // 100],
        "wall_s": max(stored[name].stored_s for name in names) - began_s,
        "conditions_s": max(each.stored_s for each in shown.values()) - began_s,
        "charges": sum(each.resource == "nodefaultpolicies/status" for each in written),
    }
    print(f"  {len(names)} nodes: {figures}, load {load_average()}", file=sys.stderr, flush=True)
    return figures


async def _connect(session: aiohttp.ClientSession) -> None:
    async with session.get("/version") as response:
        response.raise_for_status()
        await response.read()


async def _show(session: aiohttp.ClientSession, name: str) -> None:
    """Write the condition as the agent does."""
    now = rfc3339(time.time())
    condition = {**SIGN, "lastHeartbeatTime": now, "lastTransitionTime": now}
    await patch(session, f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}}, kind=STRATEGIC)


async def _overshoot(server: Server, names: Sequence[str]) -> tuple[int, int, int]:
    """Let more and more nodes fail; return by how many the limit was exceeded, how many were out, and the limit."""
    mark, limit = server.mark(), limit_of(len(names), PERCENT)
    async with server.client() as session:
        for at in range(0, 2 * limit, STEPS):
            await side_by_side([_show(session, name) for name in names[at : at + STEPS]])
            await asyncio.sleep(0.5)
    await asyncio.sleep(SETTLE_S)
    most = len(_taints(server.written(mark)))
    status = (await server.cluster.get(POLICY))["status"]
    if most < limit - STEPS or not status["breaker"]["latched"]:
        raise RuntimeError(f"the breaker was not reached: {most} out, limit {limit}, {status['breaker']['message']!r}")
    return max(0, most - limit), most, limit


async def _reset(server: Server, names: Sequence[str]) -> None:
    """Remove conditions and taints while no controller acts on them."""
    delete = {"status": {"conditions": [{"type": SIGN["type"], "$patch": "delete"}]}}
    clean = {"metadata": {"labels": {HEALTH: None}, "annotations": {HEALTH: None}}, "spec": {"taints": None}}
    async with server.client() as session:

        async def one(name: str) -> None:
            await patch(session, f"/api/v1/nodes/{name}/status", delete, kind=STRATEGIC)
            await patch(session, f"/api/v1/nodes/{name}", clean)

        await side_by_side([one(name) for name in names])


async def _tainted(server: Server, mark: int) -> int:
    return len(_taints(server.written(mark)))


def _taints(written: Sequence[Written]) -> dict[str, Written]:
    """Return the first write of each node that set our taint."""
    found: dict[str, Written] = {}
    for each in written:
        if each.resource == "nodes" and each.verb == "patch":
            taints = (each.body.get("spec") or {}).get("taints") or ()
            if any(taint.get("key") == HEALTH for taint in taints):
                found.setdefault(each.name, each)
    return found


def _is_sign(each: Written) -> bool:
    return each.resource == "nodes/status" and each.agent == BENCH_AGENT


async def _until(count: Callable[[], Any], wanted: int) -> None:
    until_s = time.monotonic() + WITHIN_S
    while (found := await count()) < wanted:
        if time.monotonic() > until_s:
            raise RuntimeError(f"{found} of {wanted} after {WITHIN_S:.0f} s")
        await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
