"""A rank without torch that does what a script says: stands in for training where only processes matter.

The script is the file named by ``SCRIPT``; a rank reads its newest word again and again: ``run``, ``finish``,
``silent`` (end without a last record), ``exit=<rank>:<code>``, ``raise=<rank>:<words>``, or ``stray=<rank>`` (start a
process that leaves its group, and tell its pid).
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from polyreme_api.environment import PROGRESS_FD, RankEnvironment

POLL_S = 0.005


def main() -> int:
    environment = RankEnvironment.parse(os.environ)
    script = Path(os.environ["SCRIPT"])
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    born = Path(os.environ["POLYREME_POD_DIRECTORY"]) / f"born-{environment.rank}.a{environment.attempt}"
    temporary = born.with_name(born.name + ".tmp")
    temporary.write_text(f"{time.time()!r} {os.getpid()} {environment.resume_from or ''}")
    # First: who sees the file may end this process.
    print(f"rank {environment.rank} of {environment.world_size} lives", flush=True)
    temporary.replace(born)
    _say(environment, "Training", step=1)
    while True:
        if asked:
            return 75
        word = script.read_text().strip()
        if word == "finish":
            _say(environment, "Done", step=2)
            return 0
        if word == "silent":
            return 0
        if word.startswith(f"exit={environment.rank}:"):
            return int(word.rpartition(":")[2])
        if word.startswith(f"raise={environment.rank}:"):
            raise RuntimeError(word.partition(":")[2])
        if word == f"stray={environment.rank}":
            _stray(born.parent / "stray")
        time.sleep(POLL_S)


def _stray(told: Path) -> None:
    if not told.exists():
        stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        told.write_text(str(stray.pid))


def _say(environment: RankEnvironment, phase: str, *, step: int) -> None:
    if environment.progress_fd is not None:
        record = {"attempt": environment.attempt, "phase": phase, "step": step, "steps": 2}
        os.write(int(os.environ[PROGRESS_FD]), json.dumps(record).encode() + b"\n")
