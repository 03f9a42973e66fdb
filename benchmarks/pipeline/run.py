"""The data pipeline against two plain processes and Ray Data, which do the same operations into the same kind of store.

Usage: run.py [--samples 600] [--rounds 3] [--ray FOLDER] [--folder DIRECTORY]
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sqlalchemy import URL, create_engine, text

from polyreme_datahub.sandbox.process import ENVIRONMENT

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.pipeline import photos, usage

from tools.cluster.servers import Servers
from tools.services.services import shared

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES, ROUNDS = 600, 3
BARS = {"embedded_floor_ratio": 0.9, "servers_floor_ratio": 0.7, "ray_ratio": 1.0}
LIMIT_S = 500.0
REQUIREMENTS = HERE / "ray.txt"
RAY = Path.home() / ".cache/polyreme/ray-peer"
ALLOCATOR = {name: value for name, value in ENVIRONMENT.items() if name.startswith(("MALLOC", "OMP", "OPENBLAS"))}
"""What our children run with; the others get it, too."""
_numbers = itertools.count()


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ray", type=Path, default=RAY, help="Environment of Ray; made if there is none.")
    parser.add_argument("--folder", type=Path, help="Where the stores are made; a disk, not memory.")
    options = parser.parse_args()
    listing = photos.write_photos(photos.FOLDER, options.samples)
    for line in listing.read_text().splitlines():  # into the file cache
        (photos.FOLDER / json.loads(line)["images"][0]).read_bytes()
    make_environment(options.ray)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyreme-bench-", dir=options.folder)))
        variables = stack.enter_context(shared(place / "services"))
        contenders = {
            "plain": lambda: run_plain(place, listing),
            "embedded": lambda: run_embedded(place, listing),
            "ray": lambda: run_ray(place, listing, options.ray),
            "plain_s3": lambda: run_plain_s3(listing, variables),
            "servers": lambda: run_servers(listing, variables),
        }
        rounds = [one_round(contenders, place / "services", options.samples) for _ in range(options.rounds)]
    figures = summary(rounds, options.samples)
    ok = all(figures[name] >= bar for name, bar in BARS.items())
    print(json.dumps({"name": "bench-pipeline", "figures": figures, "bar": BARS, "ok": ok}))
    return 0 if ok else 1


def one_round(
    contenders: Mapping[str, Callable[[], dict[str, Any]]], servers: Path, samples: int
) -> dict[str, dict[str, Any]]:
    """Run each contender once, one after another."""
    found: dict[str, dict[str, Any]] = {}
    for name, run in contenders.items():
        before_s = servers_s(servers)
        found[name] = run()
        found[name]["servers_cpu_s"] = servers_s(servers) - before_s
        assert found[name]["samples"] == samples, found[name]
        print(f"{name}: {found[name]}", file=sys.stderr)
    assert len({one["outputs"] for one in found.values()}) == 1, found
    return found


def summary(rounds: list[dict[str, dict[str, Any]]], samples: int) -> dict[str, Any]:
    """Return medians over the rounds."""
    figures: dict[str, Any] = {"samples": samples, "rounds": len(rounds)}
    pairs = {"embedded_floor": ("embedded", "plain"), "servers_floor": ("servers", "plain_s3")}
    pairs |= {"ray": ("embedded", "ray"), "servers_to_local_floor": ("servers", "plain")}
    for kind, suffix in (("wall_s", "ratio"), ("cpu_s", "cpu_ratio")):
        for name, (ours, theirs) in pairs.items():
            ratios = [round(one[theirs][kind] / one[ours][kind], 3) for one in rounds]
            figures[f"{name}_{suffix}"] = statistics.median(ratios)
            figures[f"{name}_{suffix}s"] = sorted(ratios)
    walls, cpus, servers = (
        {name: [one[name][kind] / samples for one in rounds] for name in rounds[0]}
        for kind in ("wall_s", "cpu_s", "servers_cpu_s")
    )
    for name in rounds[0]:
        figures[f"{name}_samples_per_s"] = round(1 / statistics.median(walls[name]), 1)
        figures[f"{name}_cpu_ms_per_sample"] = round(statistics.median(cpus[name]) * 1000, 2)
    figures["overhead_cpu_ms"] = {
        ours: round(statistics.median(map(float.__sub__, cpus[ours], cpus[theirs])) * 1000, 2)
        for ours, theirs in (pairs["embedded_floor"], pairs["servers_floor"])
    }
    figures["server_processes_cpu_ms"] = {
        name: round(statistics.median(each) * 1000, 2) for name, each in servers.items()
    }
    return figures


def run_plain(place: Path, listing: Path) -> dict[str, Any]:
    """Two plain processes into a folder."""
    return call([sys.executable, HERE / "plain.py", listing, f"file://{place}/plain-{next(_numbers)}"], ALLOCATOR)


def run_plain_s3(listing: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Two plain processes into a bucket."""
    objects = f"{variables['POLYREME_OBJECTS_URL']}/plain-{next(_numbers)}"
    return call([sys.executable, HERE / "plain.py", listing, objects], {**variables, **ALLOCATOR})


def run_embedded(place: Path, listing: Path) -> dict[str, Any]:
    """Our runner on SQLite and a folder."""
    number = next(_numbers)
    objects, registry = f"file://{place}/embedded-{number}", f"sqlite:///{place}/registry-{number}.sqlite"
    return call([sys.executable, HERE / "ours.py", listing, objects, registry], {})


def run_servers(listing: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Our runner on PostgreSQL, Pulsar and S3."""
    number = next(_numbers)
    registry = new_database(variables["POLYREME_DATABASE_URL"], f"bench_{number}")
    objects = f"{variables['POLYREME_OBJECTS_URL']}/servers-{number}"
    topics = variables["POLYREME_TOPICS_URL"]
    return call([sys.executable, HERE / "ours.py", listing, objects, registry, topics], variables)


def run_ray(place: Path, listing: Path, environment: Path) -> dict[str, Any]:
    """Ray Data into a folder."""
    objects = f"file://{place}/ray-{next(_numbers)}"
    places = os.pathsep.join(map(str, (ROOT, ROOT / "datahub", ROOT / "api")))
    command: list[str | Path] = [environment / "bin/python", HERE / "ray_peer.py", listing, objects]
    return call(command, {**ALLOCATOR, "PYTHONPATH": places})


def call(command: Sequence[str | Path], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run a contender; return what its last line says."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[1]} ended with code {done.returncode}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def new_database(url: str, name: str) -> str:
    """Make a database on the server of ``url``; return its URL."""
    host = parse_qs(urlsplit(url).query)["host"][0]
    base = URL.create("postgresql+psycopg2", "postgres", database="postgres", query={"host": host})
    engine = create_engine(base, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return base.set(database=name).render_as_string()


def servers_s(folder: Path) -> float:
    """Return the processor time of the servers so far [s]."""
    return sum(usage.processor_s(server.pid) for server in Servers(folder).all)


def make_environment(folder: Path) -> None:
    """Make Ray's environment, unless it was made from the same requirements."""
    stamp = folder / "made-from.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS], check=True)
    stamp.write_text(REQUIREMENTS.read_text())


if __name__ == "__main__":
    sys.exit(main())
