"""The planner: predicted against measured order of 20 layouts on 8 gloo ranks, and the search for 1,024 GPUs.

Usage: run.py [--layouts 20] [--steps 2] [--search-only]
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from polyreme_planner.automatic import quick_search
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.flops import Mix, training_flops
from polyreme_planner.hardware import FLOAT32, HARDWARE, MIXED, Hardware
from polyreme_planner.search import Estimate, Pricer, candidates
from polyreme_planner.shapes import KIMI_VL_A3B, ModelShape, model_shape

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.planner import published, standin

RANKS, PACKS, TOKENS = 8, 16, 256
COMPUTE_S = 8.0
"""Compute of one step, over all ranks: that of one rank is an eighth."""
GPUS, GPU_PACKS, GPU_TOKENS = 1024, 8192, 4096
RUNNERS_UP = 5
AUTO_WORLDS, PACKS_OF_A_RANK = (4, 64, 1024), 8
CORRELATION_MIN, SEARCH_S_MAX, SPREAD_MIN = 0.8, 30.0, 3.0
PUBLISHED_ERROR_MAX = 0.15
RUN_S_MAX = 60.0
"""How long one way to train may take before its ranks are killed: one that hangs must not outlive the run."""
MEGABYTES = (0.01, 1.0)
"""Sizes of the all-to-alls that links are calibrated by."""


def main() -> int:
    """Search, then measure; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--search-only", action="store_true")
    options = parser.parse_args()
    figures = searched() | predicted()
    orders = len(published.RUNS)
    bar = {"search_s": SEARCH_S_MAX, "published_error_ratio": PUBLISHED_ERROR_MAX, "published_orders": orders}
    ok = (
        figures["search_s"] < SEARCH_S_MAX
        and figures["published_error_ratio"] <= PUBLISHED_ERROR_MAX
        and figures["published_orders"] == orders
    )
    if not options.search_only:
        figures |= compared(options.layouts, options.steps)
        bar |= {"rank_correlation": CORRELATION_MIN, "spread_ratio": SPREAD_MIN}
        ok = ok and figures["rank_correlation"] >= CORRELATION_MIN and figures["spread_ratio"] >= SPREAD_MIN
    print(json.dumps({"name": "bench-planner", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def searched() -> dict[str, float]:
    """Search for kimi-vl-a3b on 1,024 GPUs."""
    setting = Setting(
        shape=KIMI_VL_A3B, mix=Mix(sequence_tokens=GPU_TOKENS), hardware=HARDWARE["h100-80g"], numerics=MIXED
    )
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    found = quick_search(
        setting, world=GPUS, packs_per_step=GPU_PACKS, recomputes=tuple(Recompute), runners_up=RUNNERS_UP
    )
    took_s, took_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    assert found.best is not None
    print(f"1,024 GPUs, {found.examined} layouts: {found.best.candidate} {found.best.step_s:.3f} s", file=sys.stderr)
    for other, why in found.runners_up:
        print(f"  {other.candidate} {other.step_s:.3f} s: {why}", file=sys.stderr)
    quick = {f"auto_{world}_cpu_s": auto_cpu_s(world) for world in AUTO_WORLDS}
    return {
        "search_s": round(took_s, 2),
        "search_cpu_s": round(took_cpu_s, 2),
        "search_layouts": found.examined,
        **quick,
    }


def predicted() -> dict[str, float]:
    """Calibrate on each published run in turn, and predict the others."""
    found = published.compared()
    print(
        "| calibrated on | share of the peak | " + " | ".join(run.name for run in published.RUNS) + " |",
        file=sys.stderr,
    )
    print("|---|---|" + "---|" * len(published.RUNS), file=sys.stderr)
    for of in found:
        cells = [f"{of.mfu[run.name]:.1%} ({of.mfu[run.name] / run.mfu - 1:+.1%})" for run in published.RUNS]
        print(f"| {of.on} | {of.share:.2f} | {' | '.join(cells)} |", file=sys.stderr)
    errors = [abs(of.mfu[run.name] / run.mfu - 1) for of in found for run in published.RUNS if run.name != of.on]
    return {
        "published_error_ratio": round(max(errors), 3),
        "published_within": sum(error <= PUBLISHED_ERROR_MAX for error in errors),
        "published_predictions": len(errors),
        "published_orders": sum(of.ordered for of in found),
    }


def auto_cpu_s(world: int) -> float:
    """Search as mode Auto does, nothing kept from before; the trainer's float32 on devices that have room for it."""
    setting = Setting(
        shape=KIMI_VL_A3B, mix=Mix(sequence_tokens=GPU_TOKENS), hardware=HARDWARE["h200-141g"], numerics=FLOAT32
    )
    quick_search.cache_clear()
    begin_s = time.process_time()
    found = quick_search(setting, world=world, packs_per_step=PACKS_OF_A_RANK * world, recomputes=tuple(Recompute))
    took_s = time.process_time() - begin_s
    assert found.best is not None
    print(f"{world} devices, mode Auto: {found.best.candidate} {found.best.step_s:.3f} s", file=sys.stderr)
    return round(took_s, 3)


def stand_in_shape() -> ModelShape:
    """A model that is small to exchange: its compute is slept, so its sizes matter in proportion only."""
    sizes = {"layers": 12, "heads": 8, "width": 64, "experts": 8, "kv_rank": 16, "expert_ffn_width": 128}
    return model_shape("kimi-vl-nano", {"decoder": sizes})


def compared(layouts: int, steps: int) -> dict[str, float]:
    """Predict, run, compare orders."""
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        work = Path(folder)
        calibrated = answered(work / "calibrate", functools.partial(standin.calibrated, MEGABYTES))
        setting = setting_of(calibrated)
        rows = []
        for number, estimate in enumerate(picked(setting, layouts)):
            job = standin.job_of(setting, estimate, steps)
            rows.append((estimate, answered(work / str(number), functools.partial(standin.measured, job))["step_s"]))
    order = sorted(range(len(rows)), key=lambda at: rows[at][1])
    predicted, measured = [row[0].step_s for row in rows], [row[1] for row in rows]
    foreseen = ranks_of(predicted)
    print("| measured place | predicted place | measured s | predicted s | way to train |\n|---|---|---|---|---|")
    for place, at in enumerate(order):
        row = (place + 1, foreseen[at] + 1, f"{measured[at]:.3f}", f"{predicted[at]:.3f}", rows[at][0].candidate)
        print("| " + " | ".join(map(str, row)) + " |")
    return {
        "rank_correlation": round(rank_correlation(predicted, measured), 4),
        "spread_ratio": round(max(measured) / min(measured), 2),
        "layouts": len(rows),
        "best_predicted_over_best_measured_ratio": round(measured[predicted.index(min(predicted))] / min(measured), 3),
        "largest_error_ratio": round(max(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)), 3),
        "gloo_latency_s": round(calibrated["latency_s"], 5),
    }


def setting_of(calibrated: dict[str, float]) -> Setting:
    """Describe this machine: compute is slept at one rate, links are as calibrated."""
    shape, mix = stand_in_shape(), Mix(sequence_tokens=TOKENS)
    hardware = Hardware(
        name="gloo",
        memory_bytes=1 << 40,
        peak_flops_per_s=training_flops(shape, mix) * TOKENS * PACKS / COMPUTE_S,
        flops_per_s=training_flops(shape, mix) * TOKENS * PACKS / COMPUTE_S,
        bytes_per_s=1e15,
        near_devices=RANKS,
        near_bytes_per_s=calibrated["bytes_per_s"],
        far_bytes_per_s=calibrated["bytes_per_s"],
        near_latency_s=calibrated["latency_s"],
        far_latency_s=calibrated["latency_s"],
    )
    return Setting(shape=shape, mix=mix, hardware=hardware, numerics=FLOAT32)


def picked(setting: Setting, count: int) -> list[Estimate]:
    """Choose ways to train evenly over the range of predicted times, no more than six times the fastest."""
    pricer = Pricer(setting)
    best: dict[tuple[object, ...], Estimate] = {}
    for of in candidates(setting, world=RANKS, packs_per_step=PACKS):
        if of.recompute is not Recompute.NONE:
            continue
        estimate = pricer.simulated(of, 60)
        key = (of.layout, of.schedule, of.microbatch_packs)
        if key not in best or estimate.step_s < best[key].step_s:
            best[key] = estimate
    ordered = sorted(best.values(), key=lambda estimate: estimate.step_s)
    low_s, high_s = ordered[0].step_s, min(ordered[-1].step_s, 6 * ordered[0].step_s)
    chosen: list[Estimate] = []
    for at in range(count):
        wanted_s = low_s * (high_s / low_s) ** (at / (count - 1))
        rest = [estimate for estimate in ordered if estimate not in chosen]
        chosen.append(min(rest, key=lambda estimate: abs(estimate.step_s - wanted_s)))
    return chosen


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's rho; equal values are not expected of clocks."""
    first, second = ranks_of(one), ranks_of(other)
    apart = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
    return 1 - 6 * apart / (len(one) * (len(one) ** 2 - 1))


def ranks_of(values: list[float]) -> list[int]:
    """Place of each value in rising order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0] * len(values)
    for place, at in enumerate(order):
        places[at] = place
    return places


def answered(path: Path, work: Callable[[int], dict[str, float]]) -> dict[str, float]:
    """Let a gang of new processes do something together, and return the first rank's answer.

    They are forked from this process, which has imported all they need and started no thread.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=standin.be_rank, args=(rank, RANKS, port, path, work)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    end_s = time.monotonic() + RUN_S_MAX
    for process in ranks:
        process.join(max(0.0, end_s - time.monotonic()))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    if not path.exists():
        raise TimeoutError(f"ranks did not answer within {RUN_S_MAX} s: {path.name}")
    answer: dict[str, float] = json.loads(path.read_text())
    return answer


if __name__ == "__main__":
    sys.exit(main())
