"""The loader against Mosaic Streaming, LitData and WebDataset: the same photographs, the same work, fresh processes.

Usage: run.py [--samples 512] [--rounds 1] [--workers 2] [--peers NAME ...] [--installed FOLDER] [--folder DIRECTORY]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme_api.job import parse_job
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key
from polyreme_datahub.index.sample_bytes import RECORD_FILE, member_files
from polyreme_launcher.rank_processes import ALLOCATOR

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
import photos

HERE = Path(__file__).parent

SAMPLES, ROUNDS = 512, 1
"""Fewer samples would come again inside the first window of packs, and then from the loader's cache."""
SEQUENCE_TOKENS = 2048
PACKS_PER_STEP = 8
PEERS = ("mosaic", "litdata", "webdataset")
REQUIREMENTS = HERE / "peers.txt"
INSTALLED = Path.home() / ".cache/polyreme/loader-peers"
BARS = {"warm_peer_ratio": 1.8, "cpu_peer_ratio": 0.6, "pss_over_import_mib": 150.0, "resume_first_batch_s": 0.2}
LIMIT_S = 300.0


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="Threads, or processes.")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="Peers that take part.")
    parser.add_argument("--installed", type=Path, default=INSTALLED, help="Folder of the peers; made if there is none.")
    parser.add_argument("--folder", type=Path, help="Where the data are made; a disk, not memory.")
    options = parser.parse_args()
    install_peers(options.installed)
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-", dir=options.folder) as made:
        folder = Path(made)
        prepare(folder, photos.write_photos(photos.FOLDER, options.samples))
        for peer in options.peers:
            call([HERE / "peers.py", "write", peer, folder, 0], options.installed)
        contenders: dict[str, list[str | Path | int]] = {
            "plain": [HERE / "peers.py", "read", "plain", folder, 0],
            "ours": [HERE / "ours.py", folder, options.workers],
            "ours_one_thread": [HERE / "ours.py", folder, 1],
            "ours_engine": [HERE / "ours.py", folder, options.workers, "engine"],
            **{peer: [HERE / "peers.py", "read", peer, folder, options.workers] for peer in options.peers},
        }
        rounds = [one_round(contenders, options.installed) for _ in range(options.rounds)]
    figures = {
        "samples": options.samples,
        "workers": options.workers,
        "rounds": options.rounds,
        **summary(rounds, options.peers),
    }
    ok = (
        figures["warm_peer_ratio"] >= BARS["warm_peer_ratio"]
        and figures["cpu_peer_ratio"] <= BARS["cpu_peer_ratio"]
        and figures["pss_over_import_mib"] <= BARS["pss_over_import_mib"]
        and figures["resume_first_batch_s"] <= BARS["resume_first_batch_s"]
    )
    print(json.dumps({"name": "bench-loader", "figures": figures, "bar": BARS, "ok": ok}))
    return 0 if ok else 1


def prepare(folder: Path, listing: Path) -> None:
    """Process the photographs for a job, and lay the same samples out for the peers."""
    job = {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {
                "sources": [{"name": "photos", "dataset": "photos", "weight": 1}],
                "sequenceTokens": SEQUENCE_TOKENS,
                "waitSeconds": 0,
                "tokenizer": {"vocabulary": 512},
            },
            "training": {"steps": 1_000_000, "packsPerStep": PACKS_PER_STEP},
        },
    }
    (folder / "job.json").write_text(json.dumps(job))
    registry, objects = f"sqlite:///{folder}/registry.sqlite", f"file://{folder}/objects"
    spec = parse_job(job).spec
    hub.register(registry, objects, "photos", listing)
    hub.process(spec, registry_url=registry, objects_url=objects)
    [index] = hub.open_source(objects, spec)._indexes  # noqa: SLF001 - the very samples and grids of the plan
    manifest = index.manifest
    (folder / "tokenizer.json").write_bytes((folder / "objects" / blob_key(manifest.tokenizer)).read_bytes())
    (folder / "work.json").write_text(json.dumps({"patch_px": manifest.patch_px, "merge": manifest.merge}))
    samples = folder / "samples"
    samples.mkdir()
    for at in range(len(index)):
        files = member_files(index.encoded(at))
        record = json.loads(bytes(files[RECORD_FILE]))
        [page], [grid] = record["pages"], index.grids(at).tolist()
        facts = {"name": index.sample_id(at), "conversations": record["conversations"], "open": page["open"]}
        (samples / f"{at:06d}.json").write_text(json.dumps({**facts, "grid": grid}))
        (samples / f"{at:06d}.jpg").write_bytes(files[page["file"]])


def one_round(contenders: dict[str, list[str | Path | int]], peers: Path) -> dict[str, dict[str, Any]]:
    """Run each contender once, one after another, each in a fresh process."""
    found = {}
    for name, command in contenders.items():
        found[name] = call(command, peers)
        shown = {kind: value for kind, value in found[name].items() if kind != "outputs"}
        print(f"{name}: {shown}", file=sys.stderr)
    outputs = {name: one.pop("outputs") for name, one in found.items()}
    whole = next(made for name, made in outputs.items() if name in PEERS)
    for name, made in outputs.items():
        assert made.items() <= whole.items(), f"{name} makes other tokens or pixels"
        assert name not in PEERS or len(made) == len(whole), f"{name} lost samples"
    return found


def summary(rounds: list[dict[str, dict[str, Any]]], peers: Sequence[str]) -> dict[str, Any]:
    """Return medians over the rounds; a ratio is taken to the best peer of its round."""
    figures: dict[str, Any] = {
        "warm_peer_ratio": statistics.median(
            one["ours_engine"]["samples_per_s"] / max(one[peer]["samples_per_s"] for peer in peers) for one in rounds
        ),
        "cpu_peer_ratio": statistics.median(
            one["ours_engine"]["cpu_ms_per_sample"] / min(one[peer]["cpu_ms_per_sample"] for peer in peers)
            for one in rounds
        ),
        "pss_over_import_mib": statistics.median(one["ours"]["pss_over_import_mib"] for one in rounds),
        "resume_first_batch_s": statistics.median(one["ours_engine"]["resume_first_batch_s"] for one in rounds),
    }
    figures = {name: round(value, 3) for name, value in figures.items()}
    for name in rounds[0]:
        figures[f"{name}_overhead_cpu_ms"] = round(
            statistics.median(one[name]["cpu_ms_per_sample"] - one["plain"]["cpu_ms_per_sample"] for one in rounds), 2
        )
        for kind in ("samples_per_s", "cpu_ms_per_sample", "first_batch_s", "pss_over_import_mib"):
            figures[f"{name}_{kind}"] = round(statistics.median(one[name][kind] for one in rounds), 2)
    return figures


def call(command: list[str | Path | int], peers: Path) -> dict[str, Any]:
    """Run a process; return what its last line says."""
    places = os.pathsep.join(map(str, (HERE, HERE.parent / "pipeline", peers)))
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **ALLOCATOR},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command} ended with code {done.returncode}: {done.stderr[-3000:]}")
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines and "write" not in command else {}
    return found


def install_peers(folder: Path) -> None:
    """Put the peers into a folder, unless it was made from the same requirements."""
    stamp = folder / "made-from.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", folder, "-r", REQUIREMENTS], check=True)
    stamp.write_text(REQUIREMENTS.read_text())


if __name__ == "__main__":
    sys.exit(main())
