"""The processes that bench-loader runs, one after another, and what each prints."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.loader import prepare, work

from polyreme_api import environment as names
from polyreme_launcher.rank_processes import ALLOCATOR

HERE = Path(__file__).parent
PEERS = ("mosaic", "litdata", "webdataset", "energon", "hf")
REQUIREMENTS = HERE / "peers.txt"
INSTALLED = Path.home() / ".cache/polyreme/loader-peers"
LIMIT_S = 600.0
SAME = "_same_resizer"
"""Ends the name of a peer that makes its pixels by our function."""
PREFIX = "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process."""

    script: str
    asked: Mapping[str, Any]
    path: Path | None = None
    """Folder of the peers, for a peer."""
    caches: Path | None = None
    """Where an empty folder for local copies is made."""


class Contenders:
    """All contenders over one folder of data.

    Args:
        folder: See ``prepare.prepare``.
        options: Of the benchmark.
        sources: Weights by name.
        steps: Steps that ours reads.
    """

    def __init__(self, folder: Path, options: argparse.Namespace, *, sources: Mapping[str, int], steps: int) -> None:
        self._folder, self._options, self._sources, self._steps = folder, options, sources, steps

    def write(self) -> None:
        """Write the shards of each peer."""
        for peer in self._options.peers:
            call(self._peer(peer, write=True))

    def upload(self, url: str) -> None:
        """Put the objects of ours and the shards of the peers into a bucket."""
        prepare.upload(self._folder / "objects", url)
        prepare.upload(self._folder / "shards", f"{url}/{PREFIX}")

    def warm(self) -> dict[str, Command]:
        """Return who reads from the disk."""
        return {
            "plain": self._peer("plain"),
            **({} if self._same else {f"plain{SAME}": self._peer("plain", resizer=work.OURS)}),
            "ours": self._ours(),
            "ours_one_thread": self._ours(threads=1),
            "ours_engine": self._ours(engine=True),
            **self._peers(same=True),
        }

    def cold(self, url: str) -> dict[str, Command]:
        """Return who reads from a bucket, with nothing copied yet."""
        return {
            "ours": self._ours(objects=url),
            "ours_engine": self._ours(objects=url, engine=True),
            **{
                peer: self._peer(peer, root=f"{url}/{PREFIX}/{peer}", resizer=self._options.peer_resizer)
                for peer in self._options.peers
            },
        }

    def full(self, packs: int, pack_tokens: int) -> dict[str, Command]:
        """Return who reads a mixture in packs."""
        return {
            "ours": self._ours(packs=True),
            "ours_engine": self._ours(packs=True, engine=True),
            **self._peers(same=True, packs=packs, pack_tokens=pack_tokens),
        }

    def resume(self) -> Command:
        """Return who resumes from its engine."""
        return self._ours(engine=True, resume=True)

    @property
    def _same(self) -> bool:
        return bool(self._options.peer_resizer == work.OURS)

    def _peers(self, *, same: bool, **more: Any) -> dict[str, Command]:
        found = {}
        for peer in self._options.peers:
            found[peer] = self._peer(peer, **more)
            if same and not self._same:
                found[f"{peer}{SAME}"] = self._peer(peer, resizer=work.OURS, **more)
        return found

    def _ours(self, *, objects: str = "", threads: int = 0, **more: bool) -> Command:
        asked = {
            "job": str(self._folder / "job.json"),
            "objects": objects or f"file://{self._folder}/objects",
            "steps": self._steps,
            "threads": threads or self._options.workers,
            **more,
        }
        return Command(script="ours.py", asked=asked, caches=self._folder)

    def _peer(self, peer: str, **more: Any) -> Command:
        asked = {
            "peer": peer,
            "folder": str(self._folder),
            "root": str(self._folder / "shards" / peer),
            "sources": dict(self._sources),
            "workers": self._options.workers,
            "resizer": self._options.peer_resizer,
            **more,
        }
        path = None if peer == "plain" else self._options.installed
        return Command(script="read_peer.py", asked=asked, path=path, caches=self._folder)


def one_round(commands: Mapping[str, Command]) -> dict[str, dict[str, Any]]:
    """Run each contender once, one after another, each in a fresh process; all must make the same samples."""
    found = {}
    for name, command in commands.items():
        found[name] = call(command)
        shown = {kind: round(value, 3) for kind, value in found[name].items() if kind != "outputs"}
        print(f"{name}: {shown}", file=sys.stderr)
    check({name: one.pop("outputs") for name, one in found.items()}, commands)
    return found


def check(outputs: Mapping[str, Mapping[str, Sequence[int]]], commands: Mapping[str, Command]) -> None:
    """Compare the samples: tokens of all, pixels of those who make them by the same function; peers lose none."""
    whole = max(outputs.values(), key=len)
    pixels: dict[str, dict[str, int]] = {}
    for name, made in outputs.items():
        resizer = commands[name].asked.get("resizer", work.OURS)
        known = pixels.setdefault(resizer, {})
        for sample, (tokens, patches) in made.items():
            if whole[sample][0] != tokens or known.setdefault(sample, patches) != patches:
                raise SystemExit(f"{name} makes other tokens or pixels of {sample}")
        if commands[name].path is not None and len(made) != len(whole):
            raise SystemExit(f"{name} read {len(made)} samples of {len(whole)}")


def call(command: Command) -> dict[str, Any]:
    """Run a process; return what its last line says."""
    places = [HERE.parents[1], *([] if command.path is None else [command.path])]
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=command.caches))
    asked = {**command.asked, **({"cache": str(cache)} if command.script == "read_peer.py" else {})}
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(cache / "hf"),
        names.CACHE_DIRECTORY: str(cache),
        **ALLOCATOR,
    }
    if "AWS_ENDPOINT_URL" in os.environ:
        variables["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]  # Mosaic's own name
    done = subprocess.run(
        [sys.executable, HERE / command.script, json.dumps(asked)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    shutil.rmtree(cache, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{command.script} {asked} ended with code {done.returncode}: {done.stderr[-3000:]}")
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if not asked.get("write") else {}
    return found


def install_peers(folder: Path) -> None:
    """Put the peers into a folder, unless it was made from the same requirements."""
    stamp = folder / "made-from.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", folder, "-r", REQUIREMENTS], check=True)
    stamp.write_text(REQUIREMENTS.read_text())
