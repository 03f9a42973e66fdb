"""A checkout of Kueue: its version, its own Go benchmarks and its own performance runner, all of them unmodified."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import yaml

from tools.cluster.binaries import ASSETS, programs

RUNNER = "test/performance/scheduler"
RUNNER_PROGRAMS = ("minimalkueue", "runner")
GENERATOR = f"{RUNNER}/configs/baseline/generator.yaml"
CRDS = "config/components/crd/bases"
SERVERS = ("etcd", "kube-apiserver", "kubectl")
BUILD_LIMIT_S, RUN_LIMIT_S = 1_800.0, 1_800.0
_RESULT = re.compile(r"^Benchmark\w+/(\S+?)(?:-\d+)?\s+\d+\s+([0-9.e+]+) ns/op", re.MULTILINE)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--kueue CHECKOUT``."""
    parser.add_argument(
        "--kueue", type=_checkout, metavar="CHECKOUT", help="sources of Kueue, built by Go: its own runs beside ours"
    )


def _checkout(text: str) -> Path:
    """Return the folder of a checkout.

    Raises:
        ArgumentTypeError: If it is none, or if there is no Go to build it.
    """
    sources = Path(text).resolve()
    if missing := [name for name in ("go.mod", GENERATOR, CRDS) if not (sources / name).exists()]:
        raise argparse.ArgumentTypeError(f"no {', '.join(missing)} in {sources}; name a checkout of Kueue")
    if shutil.which("go") is None:
        raise argparse.ArgumentTypeError("there is no go on PATH, by which Kueue is built; install it")
    return sources


def version(sources: Path) -> str:
    """Return the version and the day of the checkout's commit."""
    git = ["git", "-C", str(sources)]
    described = subprocess.run([*git, "describe", "--tags", "--always"], check=True, capture_output=True, text=True)
    day = subprocess.run([*git, "log", "-1", "--format=%cs"], check=True, capture_output=True, text=True)
    return f"{described.stdout.strip()} of {day.stdout.strip()}"


class GoBenchmark:
    """One benchmark of Kueue's, built once.

    Args:
        sources: The checkout.
        package: Its folder.
        name: Name of the benchmark.
        folder: Where the test binary is written.
    """

    def __init__(self, sources: Path, package: str, name: str, folder: Path) -> None:
        self._package, self._name, self._binary = sources / package, name, folder / f"{name}.test"
        _go(sources, "test", "-c", "-o", str(self._binary), f"./{package}")

    def run(self, iterations: int) -> dict[str, float]:
        """Return the mean time of an iteration [ms], by the names of its cases."""
        command = [str(self._binary), "-test.run=^$", f"-test.bench=^{self._name}$", f"-test.benchtime={iterations}x"]
        done = subprocess.run(
            command, cwd=self._package, check=True, capture_output=True, text=True, timeout=RUN_LIMIT_S
        )
        found = {case: float(nanoseconds) / 1e6 for case, nanoseconds in _RESULT.findall(done.stdout)}
        if not found:
            raise SystemExit(f"{self._name} printed no result: {done.stdout[-2000:]}")
        return found


def run_baseline(sources: Path) -> dict[str, float]:
    """Run Kueue's baseline of 15,000 workloads on etcd and API server of our own build; return its figures."""
    with tempfile.TemporaryDirectory(prefix="polyreme-kueue-") as folder:
        found, assets = programs(os.environ, SERVERS), Path(folder) / "assets"
        assets.mkdir()
        for name, path in found.items():
            (assets / name).symlink_to(path)
        _go(sources, "build", "-o", f"{folder}/", *(f"./{RUNNER}/{name}" for name in RUNNER_PROGRAMS))
        command = [f"{folder}/runner", "-o", folder, "-crds", str(sources / CRDS)]
        command += ["-generatorConfig", str(sources / GENERATOR), "-timeout", f"{RUN_LIMIT_S:.0f}s"]
        command += ["-minimalKueue", f"{folder}/minimalkueue"]
        environment = {**os.environ, ASSETS: str(assets), "PROJECT_DIR": folder}
        started_s, log = time.monotonic(), Path(folder) / "log"
        with log.open("wb") as out:
            done = subprocess.run(
                command, env=environment, cwd=folder, stdout=out, stderr=out, timeout=RUN_LIMIT_S, check=False
            )
        if done.returncode:
            raise SystemExit(f"Kueue's runner ended with {done.returncode}: {log.read_text()[-2000:]}")
        wall_s = time.monotonic() - started_s
        print(f"Kueue's runner: {wall_s:.1f} s with etcd's and the API server's start", file=sys.stderr)
        stats = yaml.safe_load((Path(folder) / "minimalkueue.stats.yaml").read_text())
        return {"kueue_s": round(stats["wallMs"] / 1000, 1), "kueue_cpu_s": round(stats["userMs"] / 1000, 1)}


def _go(sources: Path, *arguments: str) -> None:
    print(f"building {_last(arguments)} of {sources.name} (minutes, the first time)", file=sys.stderr)
    done = subprocess.run(
        ["go", *arguments], cwd=sources, check=False, capture_output=True, text=True, timeout=BUILD_LIMIT_S
    )
    if done.returncode:
        raise SystemExit(f"go {' '.join(arguments)} in {sources}: {done.stderr[-2000:]}")


def _last(arguments: Iterable[str]) -> str:
    return [word for word in arguments if word.startswith("./")][-1]
