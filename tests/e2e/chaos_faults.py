"""The faults of ``make soak-chaos``: what each one does to a run that trains, and what a person does about it, if
anything.

A fault strikes a ``Trial``: a run that has trained a random number of steps. Files are damaged by flipping bytes in
place, as a disk does, or deleted; then a rank is killed, so that the processes that read the file at a start read it.
Files that only the command reads are struck while it is dead."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from polyreme.run_files.paths import Home
from polyreme_datahub.digests import blob_key
from tests.e2e.polyreme_home import PolyremeHome, Serving, unless_gone

FLIPPED_BYTES = 16
FULL_DISK_BYTES = 4096
"""No file may grow beyond this once the disk is full."""
PAUSE_S = 12.0
"""How long a command is stopped: longer than the heartbeat of the small job."""
CLOCK_STEPS_S = (3600.0, -3600.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A run that is being struck."""

    home: PolyremeHome
    serving: Serving
    rng: random.Random
    clock: Path
    """File that holds how far the clock of all processes is off [s]."""

    @property
    def objects(self) -> Path:
        """The object store."""
        return self.home.path / "data" / "objects"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    strike: Callable[[Trial], None]
    gang: bool = False
    """Whether it needs two workers."""
    early: bool = False
    """Whether it strikes while data is processed, on a home without data."""
    mend: Callable[[Trial], None] | None = None
    """What the command's own words tell a person to do before the same command is given again."""


def faults() -> list[Fault]:
    """List all faults."""
    return [
        *_signals(),
        *_files("data", _data_files, then=_kill_a_rank),
        Fault(name="lakehouse files of all kinds damaged", strike=_damage_all_indexes),
        *_files("checkpoint", _checkpoint_files, then=_kill_a_rank),
        *_files("run", _run_files, first=_kill_run, mends={"registry.sqlite": _move_registry_away}),
        Fault(name="disk full", strike=_fill_disk),
        *(Fault(name=f"clock {step_s:+g} s", strike=_step_clock(step_s)) for step_s in CLOCK_STEPS_S),
        *(
            Fault(name=f"clock {step_s:+g} s, then a rank killed", strike=_then(_step_clock(step_s), _kill_a_rank))
            for step_s in CLOCK_STEPS_S
        ),
    ]


def _signals() -> Iterator[Fault]:
    names = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGSTOP")
    for name in names:
        number = signal.Signals[name]
        for who in ("leading launcher", "other launcher", "fork server", "rank"):
            yield Fault(name=f"{name} {who}", strike=_to(who, number), gang=True)
        # Only a person continues a command that was stopped.
        yield Fault(name=f"{name} polyreme run", strike=_pause_run if name == "SIGSTOP" else _to_run(number))
        yield Fault(name=f"{name} data worker", strike=_to_data_worker(number), early=True)
    yield Fault(name="SIGTERM polyreme run, twice", strike=_twice)


def _to(who: str, number: signal.Signals) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        index = trial.rng.choice((0, 1)) if who in {"fork server", "rank"} else int(who == "other launcher")
        pids = trial.serving.pids(index)
        key = {"fork server": "fork_server", "rank": str(index)}.get(who, "launcher")
        os.kill(pids[key], number)

    return strike


def _to_run(number: signal.Signals) -> Callable[[Trial], None]:
    return lambda trial: trial.serving.process.send_signal(number)


def _twice(trial: Trial) -> None:
    trial.serving.process.send_signal(signal.SIGTERM)
    trial.serving.until(lambda: "stopping" in trial.serving.said, "it stops")
    unless_gone(lambda: trial.serving.process.send_signal(signal.SIGTERM))


def _pause_run(trial: Trial) -> None:
    trial.serving.process.suspend()
    time.sleep(PAUSE_S)
    trial.serving.process.resume()


def _to_data_worker(number: signal.Signals) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        found = trial.serving.until(lambda: _data_workers(trial.serving), "the data worker has started")
        trial.serving.until(lambda: any(trial.objects.rglob("*")), "it has written something")
        for worker in found:
            unless_gone(functools.partial(worker.send_signal, number))

    return strike


def _data_workers(serving: Serving) -> list[psutil.Process]:
    return [one for one in serving.tree() if "polyreme_datahub_service.worker" in (unless_gone(one.cmdline) or ())]


def _kill_a_rank(trial: Trial) -> None:
    os.kill(trial.serving.pids(0)["1"], signal.SIGKILL)


def _kill_run(trial: Trial) -> None:
    trial.serving.process.kill()
    trial.serving.process.wait()


def _then(*strikes: Callable[[Trial], None]) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        for one in strikes:
            one(trial)

    return strike


def _step_clock(step_s: float) -> Callable[[Trial], None]:
    return lambda trial: _write(trial.clock, repr(step_s))


def _fill_disk(trial: Trial) -> None:
    for process in trial.serving.tree():
        limits = (FULL_DISK_BYTES, FULL_DISK_BYTES)
        unless_gone(functools.partial(process.rlimit, resource.RLIMIT_FSIZE, limits))


def _move_registry_away(trial: Trial) -> None:
    for path in (trial.home.path / "data").glob("registry.sqlite*"):
        path.unlink()


def _files(
    group: str,
    kinds: Callable[[Trial], dict[str, list[Path]]],
    *,
    first: Callable[[Trial], None] | None = None,
    then: Callable[[Trial], None] | None = None,
    mends: dict[str, Callable[[Trial], None]] | None = None,
) -> Iterator[Fault]:
    for kind in _KINDS[group]:
        for verb, harm in (("damaged", _flip), ("deleted", _delete)):

            def strike(trial: Trial, kind: str = kind, harm: Callable[[Path, random.Random], None] = harm) -> None:
                if first is not None:
                    first(trial)
                files = [path for path in kinds(trial)[kind] if path.is_file()]
                # Of checkpoints the newest; elsewhere there is one file of a kind, or any will do.
                harm(files[-1] if group == "checkpoint" else trial.rng.choice(files), trial.rng)
                if then is not None:
                    then(trial)

            yield Fault(
                name=f"{kind} {verb}", strike=strike, mend=(mends or {}).get(kind) if verb == "damaged" else None
            )


_KINDS = {
    "data": ("plan object", "index manifest", "index shard", "tokenizer", "bundle of pages"),
    "checkpoint": ("tensors", "INDEX.json", "COMMIT.json", "resume point", "claim"),
    "run": (
        "cluster.journal", "run.json", "job.yaml", "state.json", "timeline.jsonl", "data.json", "host.log", "data.log",
        "process.json", "processes.json", "pod's job.json", "pod's token", "registry.sqlite",
    ),
}  # fmt: skip


def _data_files(trial: Trial) -> dict[str, list[Path]]:
    plans = sorted((trial.objects / "plans").iterdir())
    plan = json.loads(plans[0].read_bytes())
    manifests = [trial.objects / blob_key(digest) for digest in set(plan["manifests"].values())]
    shards = [
        trial.objects / blob_key(shard["digest"])
        for manifest in manifests
        for shard in json.loads(manifest.read_bytes())["shards"]
    ]
    tokenizer = trial.objects / blob_key(plan["tokenizer"])
    known = {*manifests, *shards, tokenizer}
    bundles = [path for path in sorted((trial.objects / "blobs").rglob("*")) if path.is_file() and path not in known]
    return {
        "plan object": plans,
        "index manifest": manifests,
        "index shard": shards,
        "tokenizer": [tokenizer],
        "bundle of pages": bundles,
    }


def _damage_all_indexes(trial: Trial) -> None:
    files = _data_files(trial)
    for kind in ("index shard", "tokenizer"):
        for path in files[kind]:
            _flip_all(path)


def _checkpoint_files(trial: Trial) -> dict[str, list[Path]]:
    root = trial.serving.run.checkpoints
    # Where none before it is whole, starting over is a person's decision.
    trial.serving.until(lambda: len(trial.serving.committed(1)) > 1, "two checkpoints are committed")
    newest = max(root.glob("a*-s*/COMMIT.json")).parent
    return {
        "tensors": sorted(newest.glob("*.bin")),
        "INDEX.json": [newest / "INDEX.json"],
        "COMMIT.json": [newest / "COMMIT.json"],
        "resume point": sorted((root / "attempts").glob("*.json")),
        "claim": sorted((root / "attempts").glob("*.claim")),
    }


def _run_files(trial: Trial) -> dict[str, list[Path]]:
    run, home = trial.serving.run, Home(path=trial.home.path)
    return {
        "cluster.journal": [run.journal_file],
        "run.json": [run.identity_file],
        "job.yaml": [run.job_file],
        "state.json": [run.state_file],
        "timeline.jsonl": [run.path / "timeline.jsonl"],
        "data.json": [run.data_report],
        "host.log": [run.host_log],
        "data.log": [run.data_log],
        "process.json": sorted(run.pods.glob("*/process.json")),
        "processes.json": sorted(run.pods.glob("*/processes.json")),
        "pod's job.json": sorted(run.pods.glob("*/job.json")),
        "pod's token": sorted(run.pods.glob("*/token")),
        "registry.sqlite": [home.path / "data" / "registry.sqlite"],
    }


def _flip(path: Path, rng: random.Random) -> None:
    """Flip some bytes of a file in place; of SQLite's the header too, or it might lie in a page that is never read."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        places = [rng.randrange(size) for _ in range(FLIPPED_BYTES)] if size else []
        for at in (*places, *(range(16) if path.name == "registry.sqlite" else ())):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 255]))


def _flip_all(path: Path) -> None:
    with path.open("r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(bytes(byte ^ 255 for byte in data))


def _delete(path: Path, _rng: random.Random) -> None:
    path.unlink()


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
