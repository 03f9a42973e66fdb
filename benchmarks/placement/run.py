"""Time of one placement, from a snapshot of the nodes to the node of every rank, search of the order of ranks included.

Usage: run.py [--decisions 60] [--runs 3] [--kueue CHECKOUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.shared import kueue
from benchmarks.shared.inventory import inventory_of

from polyreme_api.job.workers import Topology
from polyreme_operator.placement.place import place
from polyreme_operator.types.inventory import GangRequest, Inventory, LevelView, Placed
from polyreme_planner.layout import Layout
from polyreme_planner.traffic_volume import GroupVolume

GPU = "nvidia.com/gpu"
DEVICES = 16
"""Of a node."""
RESOURCES = ("cpu", "memory", GPU, "pods")
LEVELS = tuple(LevelView(name=name, node_label=f"net/{name}") for name in ("block", "rack", "nvlink"))
BAR_15K_MS, BAR_2304_MS = 15.0, 10.0
SEED = 7
KUEUE_PACKAGE, KUEUE_BENCHMARK = "pkg/cache/scheduler", "BenchmarkTASFlavorAssignment"
KUEUE_CASE, KUEUE_LEADER_CASE = "nodes=2500/workersOnly", "nodes=2500/withLeader"
KUEUE_NODES, KUEUE_RACK, KUEUE_BLOCK, KUEUE_PODS = 2_500, 16, 256, 2_304
"""Nodes of the cluster, of a rack and of a block, and pods of the gang, of that case."""
KUEUE_NODE = {"cpu": 96_000, "memory": 384 << 30, GPU: 0, "pods": 110}
KUEUE_POD_CPU = 8_000


@dataclasses.dataclass(frozen=True)
class Size:
    """A cluster of blocks x racks x hosts, and the gang that is placed on it."""

    blocks: int
    racks: int
    hosts: int
    workers: int

    @property
    def nodes(self) -> int:
        """Hosts of the cluster."""
        return self.blocks * self.racks * self.hosts


SIZES = {
    "gang_1k_nodes_1k": Size(blocks=5, racks=10, hosts=20, workers=1_000),
    "gang_2304_nodes_2500": Size(blocks=10, racks=10, hosts=25, workers=2_304),
    "gang_5k_nodes_5k": Size(blocks=10, racks=25, hosts=20, workers=5_000),
    "gang_15k_nodes_15k": Size(blocks=15, racks=50, hosts=20, workers=15_000),
}
SHAPES = {"empty": (1.0, 8), "fragmented": (0.5, 2), "full": (0.1, 1)}
"""Share of the devices that is free, and devices of a worker: so that the gang fits, though barely."""


def main() -> int:
    """Measure every size on every shape of cluster; 0 when both bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    kueue.add_option(parser)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, size in SIZES.items():
        by_shape = {shape: measure(size, shape, options.decisions, options.runs) for shape in SHAPES}
        for shape, measured in by_shape.items():
            figures |= {f"{name}_{shape}_{key}": round(value, 2) for key, value in measured.items()}
        for key in ("p99_ms", "cpu_p99_ms"):
            figures[f"{name}_{key}"] = max(figures[f"{name}_{shape}_{key}"] for shape in SHAPES)
    bar = {"gang_15k_nodes_15k_p99_ms": BAR_15K_MS, "gang_2304_nodes_2500_p99_ms": BAR_2304_MS}
    ok = all(figures[name] < limit for name, limit in bar.items())
    if options.kueue:
        figures |= beside_kueue(options.kueue, options.decisions, options.runs)
    figures |= {"decisions": options.decisions, "runs": options.runs, "load_1m": round(os.getloadavg()[0], 1)}
    print(json.dumps({"name": "bench-placement", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def measure(size: Size, shape: str, decisions: int, runs: int) -> dict[str, float]:
    """Return percentiles of the time of placing the gang, by clock and by processor, each the median of runs."""
    free_share, devices = SHAPES[shape]
    inventory = cluster(size, free_share, devices)
    request = gang(size.workers, devices)
    by_run: list[dict[str, float]] = []
    for _ in range(runs):
        times = np.sort(np.array([timed(inventory, request) for _ in range(decisions)]), axis=0)
        p99 = times[min(decisions - 1, int(decisions * 0.99))]
        p50 = np.median(times, axis=0)
        by_run.append({"p50_ms": p50[0], "p99_ms": p99[0], "cpu_p50_ms": p50[1], "cpu_p99_ms": p99[1]})
    found = {key: statistics.median(float(run[key]) for run in by_run) for key in by_run[0]}
    words = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
    print(f"{size.workers:6} workers, {size.nodes:6} nodes, {shape:10}: {words}", file=sys.stderr)
    return found


def beside_kueue(sources: Path, decisions: int, runs: int) -> dict[str, float | str]:
    """Run Kueue's own benchmark and the same placement of ours in turn, and compare them pair by pair."""
    inventory, plain, ranked = kueue_shape()
    pairs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="polyreme-kueue-") as folder:
        theirs = kueue.GoBenchmark(sources, KUEUE_PACKAGE, KUEUE_BENCHMARK, Path(folder))
        for _ in range(runs):
            by_case = theirs.run(decisions)
            means = [np.mean([timed(inventory, each) for _ in range(decisions)], axis=0) for each in (plain, ranked)]
            pairs.append(
                {
                    "kueue_2304_nodes_2500_mean_ms": by_case[KUEUE_CASE],
                    "kueue_2304_nodes_2500_leader_mean_ms": by_case[KUEUE_LEADER_CASE],
                    "same_shape_mean_ms": float(means[0][0]),
                    "same_shape_cpu_mean_ms": float(means[0][1]),
                    "same_shape_ranked_mean_ms": float(means[1][0]),
                    "to_kueue_ratio": float(means[0][0]) / by_case[KUEUE_CASE],
                    "ranked_to_kueue_ratio": float(means[1][0]) / by_case[KUEUE_CASE],
                }
            )
    medians = {key: round(statistics.median(pair[key] for pair in pairs), 3) for key in pairs[0]}
    return {**medians, "kueue_version": kueue.version(sources)}


def kueue_shape() -> tuple[Inventory, GangRequest, GangRequest]:
    """Build the empty cluster of Kueue's benchmark and its gang, without a plan and with one that orders its ranks."""
    labels = {
        f"node-{at:05}": {"net/block": f"block-{at // KUEUE_BLOCK}", "net/rack": f"rack-{at // KUEUE_RACK}"}
        for at in range(KUEUE_NODES)
    }
    capacity_NR = np.tile(np.array([KUEUE_NODE[name] for name in RESOURCES], dtype=np.int64), (KUEUE_NODES, 1))
    inventory = inventory_of(labels, LEVELS[:2], RESOURCES, capacity_NR, np.zeros_like(capacity_NR))
    ranked = dataclasses.replace(
        gang(KUEUE_PODS, 1), requests=(("cpu", KUEUE_POD_CPU), ("pods", 1)), topology=Topology(preferred="rack")
    )
    return inventory, dataclasses.replace(ranked, layout=Layout(), volumes=()), ranked


def timed(inventory: Inventory, request: GangRequest) -> tuple[float, float]:
    """Place once and check the answer [ms, ms of processor]; nothing computed before is reused."""
    inventory.memo.clear()
    gc.collect()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    found = place(inventory, request)
    took_s, took_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    assert isinstance(found, Placed), found
    workers_N = np.bincount(found.rows_W, minlength=len(inventory.names))
    assert len(found.rows_W) == request.workers
    for resource, amount in request.requests:
        column = inventory.resources.index(resource)
        assert (workers_N * amount <= inventory.capacity_NR[:, column] - inventory.used_NR[:, column]).all()
    return took_s * 1e3, took_cpu_s * 1e3


def cluster(size: Size, free_share: float, devices: int) -> Inventory:
    """Build a cluster with this share of its devices free, unevenly: whole nodes free, whole nodes taken, halves."""
    rng = np.random.default_rng(SEED)
    labels = {
        f"node-{at:05}": {
            "net/block": f"block-{at // (size.racks * size.hosts)}",
            "net/rack": f"rack-{at // size.hosts}",
            "net/nvlink": f"nvlink-{at // size.hosts}-{at % size.hosts // 4}",
        }
        for at in range(size.nodes)
    }
    capacity_NR = np.tile(np.array([192_000, 2 << 40, DEVICES, 110], dtype=np.int64), (size.nodes, 1))
    used_NR = np.zeros_like(capacity_NR)
    if free_share < 1:
        free_N = np.minimum(DEVICES, (rng.exponential(free_share * DEVICES * 1.3, size.nodes)).astype(np.int64))
        used_NR[:, 2] = DEVICES - free_N
        used_NR[:, 0] = used_NR[:, 2] * 8_000
    else:
        devices = DEVICES
        used_NR[:, 3] = 9  # pods of daemon sets
    assert int((DEVICES - used_NR[:, 2]).sum()) // devices >= size.workers
    risk_N = rng.random(size.nodes).astype(np.float32) * np.float32(0.1)
    return dataclasses.replace(inventory_of(labels, LEVELS, RESOURCES, capacity_NR, used_NR), risk_N=risk_N)


def gang(workers: int, devices: int) -> GangRequest:
    """Build a mixture-of-experts job over all axes: pp 3 or 5, tp 2 or 4, ep up to 32."""
    world = workers * devices
    tp = 4 if devices >= 4 else 2
    pp = next(degree for degree in (3, 5, 4) if world % (degree * tp) == 0)
    dp = world // (tp * pp)
    ep = max(2**power for power in range(6) if dp * tp % 2**power == 0)
    layout = Layout(dp=dp, ep=ep, pp=pp, tp=tp)
    assert layout.world == world, layout
    sent_bytes = {"tp": 200, "ep": 80, "pp": 4, "dp": 16, "edp": 2}
    volumes = tuple(
        GroupVolume(axis=axis, ranks=getattr(layout, axis), bytes_per_rank=amount << 28, messages=1)
        for axis, amount in sent_bytes.items()
    )
    return GangRequest(
        workers=workers,
        devices=devices,
        requests=(("cpu", 4_000 * devices), ("memory", devices << 36), (GPU, devices), ("pods", 1)),
        topology=Topology(preferred="block"),
        layout=layout,
        volumes=volumes,
    )


if __name__ == "__main__":
    sys.exit(main())
