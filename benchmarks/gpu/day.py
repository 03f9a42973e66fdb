"""``make gpu-day``: what a first day with GPUs should answer, in 25 minutes: tests, a traced step, the suite, a table.

Usage: day.py [--rehearse] [--ours-only] [--minutes 25] [--only trace G1 ...] [--folder build/gpu-day]

Each part is a process of its own, the most important first. What a part found is kept as soon as it ends, by commit and
device, so a call continues where an earlier one ended, was killed, or ran out of its minutes. A part that failed is run
again by the next call. Traces are opened by Perfetto or chrome://tracing.

Ends with 0 when all parts ran and met their bars, 1 when one failed or is left, 7 when there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import parse_job
from polyreme_planner.plan import plan_for

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.gpu.bounded import ROOT, run_bounded
from benchmarks.gpu.harness import hardware_named_by

FOLDER = ROOT / "build" / "gpu-day"
MINUTES = 25.0
LEAST_S = 30.0
"""A part is not begun with less time left."""
MFU_GOAL = 0.40
"""Of one H100, cut in depth."""
MFU_AUTOMODEL = "0.33 to 0.34"
"""NeMo AutoModel's best published: 328 and 334 TFLOP/s a device on DGX H100 (``docs/performance-summary.mdx`` of its
repository, August 2026; Nemotron V3 Nano 30B and Super 120B, balanced by its fake gate)."""
LAYERS_MAX = 6
"""Of the traced model: those of G1 on an H200."""
CUDA_DEVICES = (
    "import torch; print(*[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], sep='\\n')"
)

Report = Mapping[str, Any]
"""What a part found: its figures, whether its bars are met, how long it took."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something to run."""

    name: str
    limit_s: float
    """Longest time that it may take."""
    command: Callable[[Day], Sequence[str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """How the day goes."""

    folder: Path
    devices: tuple[str, ...]
    """Names of the CUDA devices; none in a rehearsal."""
    ours_only: bool

    @property
    def rehearsal(self) -> bool:
        """Toy sizes on a processor."""
        return not self.devices


def tests(day: Day) -> list[str]:
    """The tests on an accelerator; a rehearsal only collects them."""
    collect = ["--collect-only"] if day.rehearsal else []
    return [sys.executable, "-m", "pytest", "-q", "--timeout=300", "-m", "device", *collect, "tests/device"]


def trace(day: Day) -> list[str]:
    """Profile a step in the layout of all devices of this machine."""
    job = day.folder / "trace.yaml"
    job.write_text(yaml.safe_dump(traced_job(day.devices)), encoding="utf-8")
    return [sys.executable, "-m", "polyreme.main", "profile", str(job), "--trace", str(day.folder / "traces"), "-ojson"]


def traced_job(devices: Sequence[str]) -> dict[str, Any]:
    """A job on all devices, experts over them, as deep as fits; without any, nano on two ranks of a processor."""
    if not devices:
        return _job(2, {"preset": "kimi-vl-nano"}, tokens=64, hardware={})
    hardware = {"hardware": hardware_named_by(devices[0]).name}
    shapes = [
        {"preset": "kimi-vl-a3b", "overrides": {"decoder": {"layers": layers}}} for layers in range(LAYERS_MAX, 1, -1)
    ]
    jobs = [_job(len(devices), shape, tokens=4096, hardware=hardware) for shape in shapes]
    return next(filter(_fits, jobs), jobs[-1])


def _fits(job: dict[str, Any]) -> bool:
    with contextlib.suppress(InvalidConfigError):
        plan_for(parse_job(job).spec)
        return True
    return False


def _job(ranks: int, shape: dict[str, Any], *, tokens: int, hardware: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpu-day"},
        "spec": {
            "model": shape,
            "data": {
                "sources": [{"name": "made-up", "dataset": "sample/digits-1"}],
                "sequenceTokens": tokens,
                "tokenizer": {"vocabulary": 304},
            },
            "training": {"steps": 1, "packsPerStep": 4 * ranks},
            "parallelism": {"mode": "Explicit", "dp": ranks, "ep": ranks},
            "workers": {"replicas": 1, "devices": ranks} | hardware,
            "checkpoint": {"everySteps": 1},
        },
    }


def benchmark(name: str) -> Callable[[Day], list[str]]:
    """One of the GPU suite."""

    def command(day: Day) -> list[str]:
        flags = ["--rehearse"] * day.rehearsal + ["--ours-only"] * day.ours_only
        return [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--only", name, "--quick", *flags]

    return command


PARTS = (
    Part(name="tests", limit_s=240, command=tests),
    Part(name="trace", limit_s=180, command=trace),
    *(
        Part(name=name, limit_s=limit_s, command=benchmark(name))
        for name, limit_s in {
            "G1": 420, "G2": 180, "G6": 150, "G4": 120, "G3": 120, "G7": 120, "G8": 90, "G5": 90,
        }.items()
    ),
)  # fmt: skip
"""The most important first."""


def main() -> int:
    """Run what is left, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a processor")
    parser.add_argument("--ours-only", action="store_true", help="leave peers out")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts to run, done or not")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where reports and traces are kept")
    options = parser.parse_args()
    devices = () if options.rehearse else cuda_devices()
    if not devices and not options.rehearse:
        sys.stderr.write("no CUDA device: torch sees none here (--rehearse runs every part at toy sizes)\n")
        return ExitCode.ENVIRONMENT
    folder = options.folder / key(devices)
    folder.mkdir(parents=True, exist_ok=True)
    day = Day(folder=folder, devices=devices, ours_only=options.ours_only)
    end_s = time.monotonic() + options.minutes * 60
    reports = {part.name: found for part in PARTS if (found := read(folder / f"{part.name}.json"))}
    for part in PARTS:
        if part.name in options.only if options.only else not reports.get(part.name, {}).get("ok"):
            left_s = end_s - time.monotonic()
            if left_s < LEAST_S:
                break
            sys.stderr.write(f"{part.name}: at most {min(part.limit_s, left_s):.0f} s\n")
            found = run(part, day, min(part.limit_s, left_s))
            # A part that fails again may end earlier than it did before.
            kept = {} if found["ok"] else reports.get(part.name, {}).get("figures", {})
            reports[part.name] = found | {"figures": kept | found["figures"]}
            write(folder / f"{part.name}.json", reports[part.name])
    show(reports, folder)
    return int(not all(reports.get(part.name, {}).get("ok") for part in PARTS))


def cuda_devices() -> tuple[str, ...]:
    """Ask torch, in a process that then frees the devices."""
    found = subprocess.run([sys.executable, "-c", CUDA_DEVICES], capture_output=True, text=True, check=False)
    return tuple(found.stdout.split("\n")[:-1]) if found.stdout.strip() else ()


def key(devices: Sequence[str]) -> str:
    """Name what reports are kept by: the commit, changed files or not, and the devices."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    kind = f"{len(devices)}x{devices[0].replace(' ', '-')}" if devices else "rehearsal"
    return f"{commit or 'no-commit'}-{kind}"


def run(part: Part, day: Day, limit_s: float) -> dict[str, Any]:
    """Run a part; lines of JSON that it prints become its figures, also where it is killed at its limit."""
    begun_s = time.monotonic()
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        environment = {**os.environ, "PYTHONPATH": paths}
        code = run_bounded(part.command(day), limit_s=limit_s, environment=environment, output=output)
        output.seek(0)
        said = output.read()
    wall_s = round(time.monotonic() - begun_s, 1)
    why = "" if code == 0 else f"took longer than {limit_s:.0f} s" if code is None else f"ended with code {code}"
    return {"ok": code == 0, "why": why, "wall_s": wall_s, "figures": figures_of(said)}


def figures_of(said: str) -> dict[str, Any]:
    """Take the figures from all that was printed, or else from its lines of JSON; none where there is no JSON."""
    figures: dict[str, Any] = {}
    for text in (said, *said.splitlines()):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            figures |= found.get("figures") or found.get("item") or {}
    return figures


def read(path: Path) -> dict[str, Any] | None:
    """Read a report; None where there is none, or half of one."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write(path: Path, report: Report) -> None:
    """Write a report whole or not at all."""
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def rows_of(reports: Mapping[str, Report]) -> list[tuple[str, str, str]]:
    """What the day is for: (what, measured, beside)."""
    step, suite = dict(reports.get("trace", {}).get("figures", {})), _figures(reports)
    rows = [
        ("MFU, 4K text, balanced", _number(suite.get("text_4k_balanced_ours_mfu")), f"goal {MFU_GOAL}"),
        *(
            (f"MFU of {peer}", _number(suite.get(f"text_4k_balanced_{peer}_mfu")), _skipped(suite, peer))
            for peer in ("transformers", "transformers_compiled", "torchtitan")
        ),
        ("MFU of AutoModel, published", MFU_AUTOMODEL, "other models, DGX H100"),
        ("exposed exchange [s a step]", _number(step.get("exposedExchangeSeconds")), _of(step.get("stepSeconds"), "s")),
        ("host waits a step", _number(step.get("hostWaits")), ""),
        ("peak memory [GiB]", _gib(step.get("peakBytes")), f"planned {_gib(step.get('plannedBytes'))}"),
        *(
            (f"planned over measured, {way}", _number(suite.get(f"{way}_planned_over_measured_ratio")), "0.8 to 1.25")
            for way in ("none", "selective", "full")
        ),
    ]
    for part in PARTS:
        report = reports.get(part.name)
        state = "left" if report is None else "met" if report["ok"] else report["why"]
        rows.append((part.name, state, "" if report is None else f"{report['wall_s']} s"))
    return rows


def show(reports: Mapping[str, Report], folder: Path) -> None:
    """Print the table, and what to do next."""
    table = Table("", "measured", "beside", title=folder.name)
    for row in rows_of(reports):
        table.add_row(*row)
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    left = [part.name for part in PARTS if not reports.get(part.name, {}).get("ok")]
    if left:
        console.print(f"left or failed: {', '.join(left)}; make gpu-day continues with them")
    console.print(f"reports and traces: {folder}")


def _figures(reports: Mapping[str, Report]) -> dict[str, Any]:
    return {name: value for report in reports.values() for name, value in report["figures"].items()}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _gib(value: Any) -> str:
    return f"{value / 2**30:.2f} GiB" if isinstance(value, int | float) else "-"


def _of(value: Any, unit: str) -> str:
    return f"of {_number(value)} {unit}"


def _skipped(figures: Mapping[str, Any], peer: str) -> str:
    return str(figures.get(f"text_4k_balanced_{peer}_skipped", ""))


if __name__ == "__main__":
    raise SystemExit(main())
