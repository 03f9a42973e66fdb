"""Bytes x distance of the order of ranks that placement finds, against by-rank order and orders drawn by chance.

Usage: run.py [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.shared.inventory import inventory_of

from polyreme_operator.placement.metric import metric_of
from polyreme_operator.placement.place import place
from polyreme_operator.placement.traffic import cost_of, traffic_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import GangRequest, Inventory, LevelView, Placed
from polyreme_planner.layout import Layout
from polyreme_planner.traffic_volume import GroupVolume

GPU, DEVICES = "nvidia.com/gpu", 8
LEVELS = tuple(LevelView(name=name, node_label=f"net/{name}") for name in ("block", "rack", "nvlink"))
GANGS = {1_000: (125, 8), 5_000: (625, 8), 15_000: (1_875, 8)}
"""Workers: dp and pp of a layout with tp 8."""
RACK_HOSTS, BLOCK_RACKS, RANDOM_ORDERS, SEED = 18, 16, 5, 11
RATIO_MAX = 1.0


def main() -> int:
    """Measure all shapes and sizes; 0 when no order is dearer than by-rank order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for shape, free_N in (("regular", regular), ("fragmented", fragmented), ("uneven", uneven)):
        for workers in GANGS:
            runs = [measure(workers, free_N(workers, np.random.default_rng(SEED + run))) for run in range(options.runs)]
            for key in runs[0]:
                figures[f"{shape}_{workers}_{key}"] = round(statistics.median(run[key] for run in runs), 4)
        figures[f"{shape}_to_by_rank_ratio"] = max(figures[f"{shape}_{workers}_to_by_rank_ratio"] for workers in GANGS)
    bar = {f"{shape}_to_by_rank_ratio": RATIO_MAX for shape in ("regular", "fragmented", "uneven")}
    ok = all(figures[name] <= limit for name, limit in bar.items())
    print(json.dumps({"name": "bench-rank-order", "figures": figures | {"runs": options.runs}, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def regular(workers: int, _rng: np.random.Generator) -> list[int]:
    """Free devices by node: an empty cluster, racks of 18 hosts."""
    return [DEVICES] * (workers + RACK_HOSTS * BLOCK_RACKS)


def fragmented(workers: int, rng: np.random.Generator) -> list[int]:
    """A third of the nodes is taken, here and there, as small jobs leave a cluster."""
    free = np.where(rng.random(workers * 8 // 5) < 1 / 3, 0, DEVICES)
    return [int(count) for count in free]


def uneven(workers: int, rng: np.random.Generator) -> list[int]:
    """Nodes of one, two and four workers, some racks half taken."""
    free = rng.choice([DEVICES, 2 * DEVICES, 4 * DEVICES], size=workers)
    taken = np.repeat(rng.random(workers // RACK_HOSTS + 1) < 0.3, RACK_HOSTS)[:workers] & (rng.random(workers) < 0.5)
    return [int(count) for count in np.where(taken, 0, free)]


def measure(workers: int, free_N: list[int]) -> dict[str, float]:
    """Place a gang and price three orders of its ranks on the same places."""
    inventory, request = cluster(free_N), gang(workers)
    begin = time.perf_counter()
    found = place(inventory, request)
    took_ms = (time.perf_counter() - begin) * 1e3
    assert isinstance(found, Placed), found
    metric, traffic = metric_of(tree_of(inventory), np.sort(found.rows_W)), traffic_of(request)
    assert metric is not None
    by_rank = cost_of(traffic, metric, np.arange(workers))
    rng = np.random.default_rng(SEED)
    chance = statistics.mean(cost_of(traffic, metric, rng.permutation(workers)) for _ in range(RANDOM_ORDERS))
    hurried = place(inventory, request, work_units=5 * traffic.lookups)
    assert isinstance(hurried, Placed), hurried
    return {
        "to_by_rank_ratio": found.cost / by_rank,
        "packed_only_to_by_rank_ratio": hurried.cost / by_rank,
        "to_random_ratio": found.cost / chance,
        "place_ms": took_ms,
    }


def cluster(free_N: list[int]) -> Inventory:
    """Racks of 18 hosts in NVLink domains of 6, 16 racks to a block."""
    nodes = len(free_N)
    labels = {
        f"node-{at:05}": {
            "net/block": f"block-{at // (RACK_HOSTS * BLOCK_RACKS):03}",
            "net/rack": f"rack-{at // RACK_HOSTS:04}",
            "net/nvlink": f"nvlink-{at // 6:05}",
        }
        for at in range(nodes)
    }
    capacity_NR = np.full((nodes, 1), 4 * DEVICES, dtype=np.int64)
    return inventory_of(labels, LEVELS, (GPU,), capacity_NR, capacity_NR - np.array(free_N, dtype=np.int64)[:, None])


def gang(workers: int) -> GangRequest:
    """A mixture of experts: tp inside a worker, ep over 5 hosts of a stage, 8 stages."""
    dp, pp = GANGS[workers]
    layout = Layout(dp=dp, ep=40, pp=pp, tp=DEVICES)
    assert layout.world == workers * DEVICES
    sent_bytes = {"tp": 60 << 30, "ep": 24 << 30, "pp": 2 << 30, "dp": 5 << 30, "edp": 1 << 30}
    volumes = tuple(
        GroupVolume(axis=axis, ranks=getattr(layout, axis), bytes_per_rank=sent, messages=1)
        for axis, sent in sent_bytes.items()
    )
    return GangRequest(workers=workers, devices=DEVICES, requests=((GPU, DEVICES),), layout=layout, volumes=volumes)


if __name__ == "__main__":
    sys.exit(main())
