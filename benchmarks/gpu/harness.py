"""Shared parts of the GPU suite's runners: the device, timing of a step, its lower bound, the report.

A step is timed by CUDA events, one run at a time: the L2 cache is flushed before each, and the median of the runs is
the figure. On a processor (``--rehearse``) the same code runs at toy sizes: it shows that the paths work, and its times
say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme_api.exit_codes import ExitCode
from polyreme_planner.hardware import GIB, HARDWARE, MEMORY_SHARE, Hardware
from polyreme_trainer.parallel.flash import use_newest_flash

WARM_RUNS, TIMED_RUNS = 10, 20
QUICK_RUNS = 3, 8
"""Warm and timed runs of a first look."""
FLUSHED_BYTES = 256 << 20
"""More than the L2 cache of any device: 50 MiB of an H100 and an H200."""
PEERS_FOLDER = Path(os.environ.get("POLYREME_GPU_PEERS", Path.home() / ".cache" / "polyreme" / "gpu-peers"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a benchmark runs, and how large."""

    device: torch.device
    rehearsal: bool
    """Toy sizes on a processor."""
    hardware: Hardware
    """What limits are derived from."""
    ours_only: bool = False
    """Leave peers out: a first run on a new device wants its answer soon."""
    quick: bool = False
    """Fewer runs, for the same reason."""
    flash: str = "none"
    """Flash kernels that attention takes: ranks' own choice."""

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in."""
        return torch.float32 if self.rehearsal else torch.bfloat16

    @property
    def peak_bytes_per_s(self) -> float:
        """Of the device's memory, by the data sheet."""
        return self.hardware.bytes_per_s / MEMORY_SHARE

    def floor_ms(self, flops: float, moved_bytes: float) -> float:
        """Return what nothing can be faster than (roofline, Williams et al., CACM 52(4), 2009)."""
        return 1e3 * max(flops / self.hardware.peak_flops_per_s, moved_bytes / self.peak_bytes_per_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One thing, run many times."""

    median_ms: float
    least_ms: float
    most_ms: float
    peak_gib: float
    """Most memory that torch held while it ran, all that stood there before included; 0 on a processor."""

    def figures(self, name: str) -> dict[str, float]:
        """Name them."""
        return {
            f"{name}_ms": round(self.median_ms, 3),
            f"{name}_least_ms": round(self.least_ms, 3),
            f"{name}_most_ms": round(self.most_ms, 3),
            f"{name}_peak_gib": round(self.peak_gib, 3),
        }


def measure(step: Callable[[], object], place: Place) -> Timing:
    """Run a step until it is warm, then time it."""
    warm, timed = (1, 2) if place.rehearsal else QUICK_RUNS if place.quick else (WARM_RUNS, TIMED_RUNS)
    for _ in range(warm):
        step()
    times = _on_processor(step, timed) if place.rehearsal else _by_events(step, timed, place.device)
    peak = 0 if place.rehearsal else torch.cuda.max_memory_allocated() - FLUSHED_BYTES
    return Timing(median_ms=statistics.median(times), least_ms=min(times), most_ms=max(times), peak_gib=peak / GIB)


def _by_events(step: Callable[[], object], runs: int, device: torch.device) -> list[float]:
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(runs):
        flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def _on_processor(step: Callable[[], object], runs: int) -> list[float]:
    times: list[float] = []
    for _ in range(runs):
        begun_s = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begun_s))
    return times


def product_bytes(rows: int, inner: int, columns: int, groups: int = 1, *, number_bytes: int = 2) -> int:
    """Bytes of a product and of its two gradients, each operand read once and each result written once.

    Args:
        rows: Of all groups together.
        inner: Width that is summed over.
        columns: Of the result.
        groups: Matrices on the right.
        number_bytes: Of one number.
    """
    return 3 * number_bytes * (rows * inner + groups * inner * columns + rows * columns)


class SkippedError(Exception):
    """A peer that cannot run here; its words go into the figures."""


def attempt(figures: dict[str, Any], name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Run a peer and take its figures; where it fails, say by what under its name: a peer never ends a benchmark.

    Returns:
        Its figures, or None.
    """
    found = None
    try:
        found = run()
    except SkippedError as error:
        figures[f"{name}_skipped"] = str(error)
    except torch.OutOfMemoryError:
        figures[f"{name}_skipped"] = "out of memory"
    except Exception as error:  # noqa: BLE001 - whatever a library of others raises is a finding
        words = " ".join(str(error).split())
        figures[f"{name}_skipped"] = f"{type(error).__name__}: {words[:300]}"
    else:
        figures |= found
    say_figures(figures)
    release()
    return found


def attempt_peer(
    figures: dict[str, Any], name: str, place: Place, run: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Run a peer, unless peers are left out."""
    if place.ours_only:
        figures[f"{name}_skipped"] = "left out by --ours-only"
        return None
    return attempt(figures, name, run)


def need_device(place: Place, why: str) -> None:
    """Skip what a processor cannot run.

    Raises:
        SkippedError: In a rehearsal.
    """
    if place.rehearsal:
        raise SkippedError(f"rehearsal on a processor: {why}")


def release() -> None:
    """Free the memory of deleted tensors, so that the next case is not charged for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def opened(place: Place, name: str) -> Iterator[None]:
    """Print the device and its state, before and after."""
    say(name, "begins on", _device_state(place))
    yield
    say(name, "ended on", _device_state(place))


def say(*words: object) -> None:
    """Write to the log; figures alone go to standard output."""
    sys.stderr.write(" ".join(map(str, words)) + "\n")
    sys.stderr.flush()


def say_figures(figures: Mapping[str, Any]) -> None:
    """Print what is known so far as a line of JSON: a run that is killed has then printed it."""
    sys.stdout.write(json.dumps({"figures": figures}) + "\n")
    sys.stdout.flush()


def _device_state(place: Place) -> str:
    if place.rehearsal:
        return "a processor, at toy sizes: times say nothing"
    asked = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,pstate"
    try:
        state = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        state = f"{torch.cuda.get_device_name()}, clocks unknown: {error}"
    return f"{state} (torch {torch.__version__})"


def device_figures(place: Place) -> dict[str, Any]:
    """What a reader must know beside any time."""
    return {"device": _device_state(place), "rehearsal": place.rehearsal, "quick": place.quick, "flash": place.flash}


def find_place(*, rehearse: bool, ours_only: bool = False, quick: bool = False) -> Place:
    """Take the device.

    Raises:
        SystemExit: With ``ExitCode.ENVIRONMENT`` where there is none, or none whose limits are known.
    """
    if rehearse:
        torch.set_num_threads(1)
        hardware = HARDWARE["h200-141g"]
        return Place(device=torch.device("cpu"), rehearsal=True, hardware=hardware, ours_only=ours_only)
    if not torch.cuda.is_available():
        say(
            "no CUDA device: torch sees none here, the GPU suite needs an H100 or H200 and its driver "
            "(--rehearse runs every part at toy sizes on a processor)"
        )
        raise SystemExit(ExitCode.ENVIRONMENT)
    hardware = hardware_named_by(torch.cuda.get_device_name())
    torch.cuda.set_device(0)
    return Place(
        device=torch.device("cuda", 0),
        rehearsal=False,
        hardware=hardware,
        ours_only=ours_only,
        quick=quick,
        flash=use_newest_flash(torch.cuda.get_device_capability()),
    )


def hardware_named_by(device_name: str) -> Hardware:
    """Find the limits of a device by what its driver calls it.

    Raises:
        SystemExit: With ``ExitCode.ENVIRONMENT`` where none are known.
    """
    for hardware in HARDWARE.values():
        if hardware.is_called(device_name):
            return hardware
    known = ", ".join(sorted(hardware.device_name for hardware in HARDWARE.values() if hardware.device_name))
    say(f"no limits are known for this device: {device_name}, known are {known}")
    raise SystemExit(ExitCode.ENVIRONMENT)


Bench = Callable[[Place], tuple[dict[str, Any], dict[str, float], bool]]
"""Runs; returns figures, bars, and whether they are met."""


def run_alone(name: str, bench: Bench, words: str | None) -> int:
    """Run one benchmark as a command and print its lines, all figures in the last; 0 when its bars are met."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a processor")
    parser.add_argument("--ours-only", action="store_true", help="leave peers out")
    parser.add_argument("--quick", action="store_true", help="fewer runs of each: a first look")
    options = parser.parse_args()
    place = find_place(rehearse=options.rehearse, ours_only=options.ours_only, quick=options.quick)
    # After our own libraries: a peer's folder brings what it needs and replaces nothing.
    sys.path.append(str(PEERS_FOLDER))
    torch.manual_seed(0)
    with opened(place, name):
        figures, bar, ok = bench(place)
    figures = device_figures(place) | figures
    sys.stdout.write(json.dumps({"name": f"bench-gpu-{name}", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def judged(figures: dict[str, Any], bar: dict[str, float], place: Place) -> bool:
    """Whether every figure that has a bar reaches it; a rehearsal is judged by having run."""
    return place.rehearsal or all(figures.get(name, float("-inf")) >= least for name, least in bar.items())


def scalar_difference(own: Tensor | float, other: Tensor | float) -> float:
    """Relative difference of two losses."""
    return abs(float(own) - float(other)) / max(1e-12, abs(float(other)))
