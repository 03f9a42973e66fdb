"""Whom to ask to make way for a gang that requires one block of a packed cluster: time of one decision, by size.

Usage: run.py [--decisions 200] [--runs 3]
"""

import argparse
import dataclasses
import gc
import json
import random
import statistics
import time

import numpy as np

from polyreme_api.job.workers import Topology
from polyreme_operator.placement.place import charge, place
from polyreme_operator.placement.topology_request import TopologyRequest, topology_request_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler.preemption.search import Victims, choose_victims
from polyreme_operator.scheduler.preemption.space import reachable, victim_space
from polyreme_operator.types.inventory import HOST_LEVEL, GangRequest, Inventory, NodeClass, Placed
from polyreme_operator.types.queues import QueueView, Quota, Running, Waiting

BAR_MS = 500.0
KUEUE_13148_MS = 40_000.0
"""One cycle with 2,000 nodes and 700 candidates, as reported there; not measured here."""
GPU, DEVICES = "nvidia.com/gpu", 8
CPU_MILLI, MEMORY_BYTES, PODS = 96_000, 2 << 40, 110
RACK, BLOCK = 10, 100
"""Nodes."""
TEAMS, OWNER = 10, "owner"
NOW_S = 1_000_000.0
SIZES = {"700_nodes_2k": (2_000, 700), "1750_nodes_5k": (5_000, 1_750), "5000_nodes_15k": (15_000, 5_000)}
"""Candidates and nodes."""


def main() -> int:
    """Measure all sizes; 0 when the bar is met and every answer clears what it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name, (nodes, candidates) in SIZES.items():
        runs = [measure(nodes, candidates, options.decisions, seed) for seed in range(options.runs)]
        for key in runs[0]:
            figures[f"candidates_{name}_{key}"] = round(statistics.median(run[key] for run in runs), 3)
    ok = figures["candidates_700_nodes_2k_p99_ms"] < BAR_MS
    bar = {"candidates_700_nodes_2k_p99_ms": BAR_MS}
    figures |= {"decisions": options.decisions, "runs": options.runs, "kueue_13148_reported_ms": KUEUE_13148_MS}
    print(json.dumps({"name": "bench-preemption", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def measure(nodes: int, candidates: int, decisions: int, seed: int) -> dict[str, float]:
    """Time decisions on two packed clusters; each answer is carried out on a copy, and the gang placed there."""
    rng = random.Random(seed)
    clusters = [packed(nodes, candidates, rng, teams=teams) for teams in (1, TEAMS)]
    ledgers = [QuotaLedger(tree, used_by(jobs)) for _, jobs, tree in clusters]
    times_ms, ratios, victims = [], [], 0
    gc.collect()
    for at in range(decisions):
        (inventory, jobs, tree), ledger = clusters[at % 2], ledgers[at % 2]
        request, preemptor = a_request(rng, queue=("team-0", OWNER)[at % 2])
        # Labels may have changed since the last decision: nothing worked out before is taken for granted.
        inventory.memo.clear()
        begin = time.perf_counter()
        found = choose_victims(inventory, request, preemptor, jobs, tree=tree, ledger=ledger, now_s=NOW_S)
        times_ms.append((time.perf_counter() - begin) * 1e3)
        victims += check(inventory, request, jobs, found)
        assert found is not None
        ratios.append(found.cost_device_s / least_cost(inventory, request, jobs))
    times_ms.sort()
    return {
        "p50_ms": statistics.median(times_ms),
        "p99_ms": times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))],
        "max_ms": times_ms[-1],
        "victims": victims / decisions,
        "cost_to_bound_ratio": statistics.mean(ratios),
    }


def packed(
    nodes: int, candidates: int, rng: random.Random, *, teams: int
) -> tuple[Inventory, list[Running], QueueTree]:
    """A cluster without a free device: gangs of workers that take nodes whole, by halves and by quarters.

    With one team, all gangs are of the preemptor's queue and of lower priority. With several, all borrow what a queue
    owns in which nothing runs.
    """
    racks, blocks = nodes // RACK, nodes // BLOCK
    row_N = np.arange(nodes, dtype=np.int32)
    capacity_NR = np.tile(np.array([CPU_MILLI, MEMORY_BYTES, DEVICES, PODS], dtype=np.int64), (nodes, 1))
    names = tuple(f"node-{row:05}" for row in range(nodes))
    inventory = Inventory(
        names=names,
        rows={name: row for row, name in enumerate(names)},
        resources=("cpu", "memory", GPU, "pods"),
        capacity_NR=capacity_NR,
        used_NR=np.zeros_like(capacity_NR),
        usable_N=np.ones(nodes, dtype=np.bool_),
        risk_N=np.zeros(nodes, dtype=np.float32),
        busy_N=np.zeros(nodes, dtype=np.int32),
        owned_N=np.zeros(nodes, dtype=np.bool_),
        class_N=np.zeros(nodes, dtype=np.int32),
        classes=(NodeClass(labels={}),),
        levels=("block", "rack", HOST_LEVEL),
        domain_LN=np.stack([row_N // BLOCK, row_N // RACK, row_N]).astype(np.int32),
        domain_names=(
            tuple(f"block-{block}" for block in range(blocks)),
            tuple(f"rack-{rack}" for rack in range(racks)),
            names,
        ),
    )
    cut = enumerate(gangs(nodes, candidates, rng))
    jobs = [a_job(at, rows, each, f"team-{at % teams}", rng) for at, (rows, each) in cut]
    for job in jobs:
        charge(inventory, GangRequest(workers=1, devices=1, requests=job.requests), job.rows_W)
    assert int(inventory.used_NR[:, 2].sum()) == nodes * DEVICES
    owned = 0 if teams == 1 else nodes * DEVICES // 2
    share = (nodes * DEVICES - owned) // teams
    queues = [QueueView(name=f"team-{team}", parent="all", quotas=(quota(share),)) for team in range(teams)]
    owner = QueueView(name=OWNER, parent="all", quotas=(quota(owned),))
    return inventory, jobs, QueueTree.of([QueueView(name="all"), owner, *queues])


def quota(nominal: int) -> Quota:
    """Quota of devices; all of it is lent."""
    return Quota(resource=GPU, nominal=nominal)


def gangs(nodes: int, count: int, rng: random.Random) -> list[tuple[list[int], int]]:
    """Cut the devices of all nodes, in order, into this many gangs of workers of 8, 4 or 2 devices."""
    cuts = sorted(rng.sample(range(1, nodes), count - 1))
    found: list[tuple[list[int], int]] = []
    for low, high in zip([0, *cuts], [*cuts, nodes], strict=True):
        each = rng.choice((DEVICES, DEVICES, DEVICES, DEVICES // 2, DEVICES // 4))
        found.append(([row for row in range(low, high) for _ in range(DEVICES // each)], each))
    for at in range(1, count):
        (rows, each), (others, other_each) = found[at - 1], found[at]
        if each == other_each < DEVICES:
            # Neighbours of one worker size share their nodes: neither's end alone clears one.
            both = [*rows, *others]
            found[at - 1], found[at] = (both[::2], each), (both[1::2], each)
    return found


def a_job(at: int, rows: list[int], each: int, queue: str, rng: random.Random) -> Running:
    """A gang that checkpointed some time within the last hour."""
    return Running(
        uid=f"job-{at:05}",
        namespace="train",
        name=f"job-{at:05}",
        queue=queue,
        priority=rng.randrange(3),
        requests=worker(each),
        devices=len(rows) * each,
        rows_W=np.asarray(rows, dtype=np.int32),
        admitted_s=NOW_S - 100_000.0,
        started_s=NOW_S - rng.uniform(0.0, 3600.0),
    )


def worker(devices: int) -> tuple[tuple[str, int], ...]:
    """What a worker with this many devices asks for."""
    return (("cpu", 10_000 * devices), ("memory", (200 << 30) * devices), (GPU, devices), ("pods", 1))


def a_request(rng: random.Random, *, queue: str) -> tuple[GangRequest, Waiting]:
    """A gang of up to a block that must lie in one."""
    workers = rng.choice((16, 32, 64, 96, BLOCK))
    request = GangRequest(
        workers=workers, devices=DEVICES, requests=worker(DEVICES), topology=Topology(required="block")
    )
    preemptor = Waiting(
        uid="p",
        queue=queue,
        priority=5,
        since_s=NOW_S,
        workers=workers,
        requests=request.requests,
        kind=0,
    )
    return request, preemptor


def used_by(jobs: list[Running]) -> dict[tuple[str, str], int]:
    """Devices by team."""
    used: dict[tuple[str, str], int] = {}
    for job in jobs:
        used[job.queue, GPU] = used.get((job.queue, GPU), 0) + job.devices
    return used


def check(inventory: Inventory, request: GangRequest, jobs: list[Running], found: Victims | None) -> int:
    """Carry an answer out: the gang must then find a place. Returns the number of victims."""
    assert found is not None, f"no victims for {request.workers} workers"
    after = dataclasses.replace(inventory, used_NR=inventory.used_NR.copy(), busy_N=inventory.busy_N.copy(), memo={})
    chosen = set(found.uids)
    for job in jobs:
        if job.uid in chosen:
            charge(after, dataclasses.replace(request, requests=job.requests), job.rows_W, sign=-1)
    placed = place(after, request, work_units=0)
    assert isinstance(placed, Placed), f"{found.message}, and still it does not fit: {placed}"
    assert chosen
    return len(chosen)


def least_cost(inventory: Inventory, request: GangRequest, jobs: list[Running]) -> float:
    """What no choice can be below, quotas aside, were gangs divisible: the least bound of all blocks."""
    domains = tree_of(inventory)
    wish = topology_request_of(inventory, domains, request)
    assert isinstance(wish, TopologyRequest)
    cost_V = np.array([job.devices * (NOW_S - job.started_s) for job in jobs])
    space = victim_space(inventory, domains, wish, request, blocked_N=None, leaving=(), candidates=jobs, cost_V=cost_V)
    return reachable(space, 0)[0][0]


if __name__ == "__main__":
    raise SystemExit(main())
