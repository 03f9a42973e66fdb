"""Kueue's own performance runner, as it comes: its baseline of 15,000 workloads through minimalkueue."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

LIMIT_S = 900.0
PROGRAMS = ("minimalkueue", "runner")
BUILD = "go build -o bin/ ./test/performance/scheduler/minimalkueue ./test/performance/scheduler/runner"
"""How both are built, in a checkout of Kueue's sources."""


def check(sources: Path) -> None:
    """Refuse a folder that can't be run.

    Raises:
        SystemExit: If a program or a configuration is missing; says which and how it is made.
    """
    wanted = [sources / "bin" / name for name in PROGRAMS] + [_generator(sources), _crds(sources)]
    if missing := [str(path) for path in wanted if not path.exists()]:
        raise SystemExit(
            f"--kueue {sources}: no {', '.join(missing)}; name a checkout of Kueue in which you ran `{BUILD}`"
        )


def run(sources: Path, assets: Path) -> dict[str, float]:
    """Run Kueue's baseline on etcd and API server of our own build; return its figures.

    Args:
        sources: The checkout.
        assets: Folder of etcd, kube-apiserver and kubectl.
    """
    with tempfile.TemporaryDirectory(prefix="polyreme-kueue-") as folder:
        command = [str(sources.resolve() / "bin/runner"), "-o", folder, "-crds", str(_crds(sources).resolve())]
        command += ["-generatorConfig", str(_generator(sources).resolve()), "-timeout", "15m"]
        command += ["-minimalKueue", str(sources.resolve() / "bin/minimalkueue")]
        environment = {**os.environ, "KUBEBUILDER_ASSETS": str(assets), "PROJECT_DIR": folder}
        started_s = time.monotonic()
        log = Path(folder) / "log"
        with log.open("wb") as out:
            done = subprocess.run(
                command, env=environment, cwd=folder, stdout=out, stderr=out, timeout=LIMIT_S, check=False
            )
        wall_s = time.monotonic() - started_s
        if done.returncode:
            raise SystemExit(f"Kueue's runner ended with {done.returncode}: {log.read_text()[-2000:]}")
        print(f"Kueue's runner: {wall_s:.1f} s with etcd's and the API server's start", file=sys.stderr)
        stats = yaml.safe_load((Path(folder) / "minimalkueue.stats.yaml").read_text())
        return {"kueue_s": round(stats["wallMs"] / 1000, 1), "kueue_cpu_s": round(stats["userMs"] / 1000, 1)}


def _generator(sources: Path) -> Path:
    return sources / "test/performance/scheduler/configs/baseline/generator.yaml"


def _crds(sources: Path) -> Path:
    return sources / "config/components/crd/bases"
