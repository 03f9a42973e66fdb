"""``make soak-chaos``: every fault once, at a random instant of a small run; a table, then one line of JSON.

``SEED=`` repeats the instants, ``FAULTS=`` runs only those whose name it matches, ``LIMIT_S=`` bounds the whole.
Each fault strikes a run of its own. It has healed when the command ends well, by itself, by the same command again, or
after what the command asked the person to do; when every step's loss is then bit for bit that of an undisturbed run;
and when no process and no memory is left. Clocks: the time of day of all processes is read through a file (by
``sitecustomize``), since to set a machine's clock takes its root; clocks that are never set are not touched."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from polyreme_api.exit_codes import ExitCode
from tests.e2e.chaos_faults import Fault, Trial, faults
from tests.e2e.polyreme_home import PolyremeHome, unless_gone

STEPS = 24
CHECKPOINT_EVERY = 4
RERUNS_MAX = 3
"""Times that the same command is given again."""
LEFT_WAIT_S = 10.0
LIMIT_S = 3600.0
PYTHON_PATH = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
MEMORY = Path("/dev/shm")
JOB = {
    "training": {"steps": STEPS, "packsPerStep": 2, "seed": 1},
    "parallelism": {"mode": "Explicit", "dp": 2, "ep": 2},
    "checkpoint": {"everySteps": CHECKPOINT_EVERY, "keep": 3},
    "health": {"heartbeatTimeoutSeconds": 10, "hang": {"action": "Restart", "stallSeconds": 8}},
    "failurePolicy": {"backoff": {"initialSeconds": 1, "maxSeconds": 2}},
}
WORKERS = {"replicas": 2, "devices": 1}
ALONE = {"replicas": 1, "devices": 2}
"""The same ranks under one launcher, which start in half the time: for faults that strike no process of a worker."""
SITE = """
import os, time
_file, _real, _known = {path!r}, time.time, [0.0, 0.0]

def _time():
    try:
        changed = os.stat(_file).st_mtime_ns
        if changed != _known[0]:
            _known[:] = [changed, float(open(_file).read())]
    except (OSError, ValueError):
        pass
    return _real() + _known[1]

time.time = _time
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one fault."""

    fault: str
    step: int
    """Newest step when it struck."""
    outcome: str
    healed: bool
    attempts: int
    seconds: float
    identical: bool
    left: tuple[str, ...]


def main() -> int:
    """Strike; 0 when everything healed."""
    seed = int(os.environ.get("SEED") or secrets.randbits(31))
    limit_s = time.monotonic() + float(os.environ.get("LIMIT_S") or LIMIT_S)
    chosen = [fault for fault in faults() if re.search(os.environ.get("FAULTS", ""), fault.name)]
    folder = Path(tempfile.mkdtemp(prefix="polyreme-chaos-"))
    rows: list[Row] = []
    try:
        prepared = PolyremeHome(folder)
        truth = _truth(prepared)
        for fault in chosen:
            if time.monotonic() > limit_s:
                break
            rows.append(_try(fault, folder, truth, random.Random(f"{seed}/{fault.name}")))
            _tell(rows[-1])
    finally:
        if all(row.healed and row.identical for row in rows):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            sys.stderr.write(f"what the runs left lies in {folder}\n")
    sys.stdout.write(_table(rows))
    figures = {
        "seed": seed,
        "faults": len(rows),
        "not_run": len(chosen) - len(rows),
        "unhealed": sum(not row.healed for row in rows),
        "different_losses": sum(not row.identical for row in rows),
        "left_behind": sum(len(row.left) for row in rows),
        "wall_s": round(sum(row.seconds for row in rows), 1),
    }
    bar = {"not_run": 0, "unhealed": 0, "different_losses": 0, "left_behind": 0}
    ok = all(figures[name] == value for name, value in bar.items())
    sys.stdout.write(json.dumps({"name": "soak-chaos", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def _truth(prepared: PolyremeHome) -> dict[int, str]:
    """Losses of an undisturbed run; its data serves the others."""
    ended = prepared.start(prepared.write_job("undisturbed", **JOB, workers=WORKERS)).end()
    if ended.code != ExitCode.OK:
        raise SystemExit(f"the undisturbed run ended with {ended.code}:\n{ended.said}")
    return prepared.losses("undisturbed")


def _try(fault: Fault, folder: Path, truth: dict[int, str], rng: random.Random) -> Row:
    path = Path(tempfile.mkdtemp(prefix=fault.name.replace(" ", "-").replace("/", "-") + "-", dir=folder))
    if not fault.early:
        shutil.copytree(folder / "data", path / "data")
    clock, site = path / "clock", path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(path=str(clock)))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *PYTHON_PATH])
    home = PolyremeHome(path)
    began_s, memory = time.monotonic(), _memory()
    struck, words = 0, ""
    try:
        job = home.write_job("struck", **JOB, workers=WORKERS if fault.gang else ALONE)
        serving = home.start(job)
        trial = Trial(home, serving, rng, clock)
        if not fault.early:
            serving.trained(attempt=1, steps=rng.randrange(2, STEPS - 6))
            struck = serving.step(1)
        fault.strike(trial)
        ended = serving.end()
        words, reruns = "by itself", 0
        while ended.code != ExitCode.OK and reruns < RERUNS_MAX:
            reruns += 1
            words = f"code {ended.code}; same command"
            if reruns == RERUNS_MAX and fault.mend is not None:
                fault.mend(trial)
                words = f"code {ended.code}; what it said, then the same command"
            ended = home.start(job).end()
        healed = ended.code == ExitCode.OK
        words = words if healed else f"code {ended.code}: {ended.said.strip().splitlines()[-1][:160]}"
        identical = healed and home.losses("struck") == truth
        attempts = len(home.records("struck").points)
    except Exception as error:  # noqa: BLE001 - a fault that breaks the harness too is a row of the table
        healed = identical = False
        attempts = 0
        words = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    left = _left(path, memory)
    home.close()
    if healed and identical and not left:
        shutil.rmtree(path, ignore_errors=True)
    return Row(
        fault=fault.name,
        step=struck,
        outcome=words,
        healed=healed,
        attempts=attempts,
        seconds=round(time.monotonic() - began_s, 1),
        identical=identical,
        left=left,
    )


def _left(home: Path, memory: set[str]) -> tuple[str, ...]:
    """Name what still runs or takes memory after a run has ended."""
    limit_s = time.monotonic() + LEFT_WAIT_S
    while True:
        left = [f"process {one.pid}" for one in psutil.process_iter() if _belongs(one, home)]
        left += [f"{MEMORY}/{name}" for name in sorted(_memory() - memory)]
        if not left or time.monotonic() > limit_s:
            return tuple(left)
        time.sleep(0.2)


def _belongs(process: psutil.Process, home: Path) -> bool:
    if process.pid == os.getpid() or unless_gone(process.status) in {None, psutil.STATUS_ZOMBIE}:
        return False
    environment = unless_gone(process.environ) or {}
    return any(str(home) in environment.get(name, "") for name in ("POLYREME_HOME", "POLYREME_POD_DIRECTORY"))


def _memory() -> set[str]:
    return {path.name for path in MEMORY.glob("polyreme*")} if MEMORY.is_dir() else set()


def _tell(row: Row) -> None:
    sys.stderr.write(f"{row.seconds:6.1f} s  {row.fault}: {row.outcome}\n")


def _table(rows: list[Row]) -> str:
    head = ("fault", "at step", "outcome", "attempts", "seconds", "identical", "left behind")
    lines = [
        (
            row.fault,
            str(row.step),
            row.outcome if row.healed else f"UNHEALED {row.outcome}",
            str(row.attempts),
            f"{row.seconds:g}",
            "yes" if row.identical else "NO",
            ", ".join(row.left) or "nothing",
        )
        for row in rows
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines))


if __name__ == "__main__":
    sys.exit(main())
